from evalsuite.names import suggestion


def test_the_closest_name_or_a_short_list() -> None:
    assert suggestion("triton-tp3", ["triton-tp2", "cutlass"]) == "; did you mean 'triton-tp2'?"
    assert suggestion("zzz", ["a", "b"]) == "; known: a, b"
    assert suggestion("zzz", []) == "; known: none"
    many = suggestion("zzz", [f"name{i}" for i in range(100)])
    assert many.endswith("and 88 more")
    assert len(many) < 120
