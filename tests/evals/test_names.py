from evalsuite.names import suggestion


def test_the_closest_name_or_a_short_list() -> None:
    assert suggestion("triton-tp3", ["triton-tp2", "cutlass"]) == "; did you mean 'triton-tp2'?"
    assert suggestion("zzz", ["a", "b"]) == "; known: a, b"
    # A part of long names is near none of them.
    long = ["suite/Qwen3-30B-A3B-BF16-triton", "suite/Qwen3-30B-A3B-BF16-aiter", "suite/Mixtral"]
    assert suggestion("qwen3_30b", long) == f"; did you mean one of {long[0]!r}, {long[1]!r}?"
    assert suggestion("mixtral", [*long[:2], "suite/of/Mixtral-8x7B-BF16-triton-tp2"]) == (
        "; did you mean 'suite/of/Mixtral-8x7B-BF16-triton-tp2'?"
    )
    assert suggestion("zzz", []) == "; known: none"
    many = suggestion("zzz", [f"name{i}" for i in range(100)])
    assert many.endswith("and 88 more")
    assert len(many) < 120
