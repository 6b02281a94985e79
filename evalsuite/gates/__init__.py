"""Gates: how counts become PASS, FAIL or INCONCLUSIVE. What makes an ERROR is `judge.py`.

`absolute` compares one run with a number, `paired` two runs on the same questions, `equal`
texts or tokens bit for bit. Each receives counts or outcomes and settings, returns `GateOutcome`.
"""
