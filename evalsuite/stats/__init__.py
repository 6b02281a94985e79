"""Statistics of accuracy gates, one concern a module; no I/O, no config, no servers.

`proportion` one run against a number; `paired` two runs of the same questions; `power` what a
test can see; `sequential` repeats, early stops and many jobs; `noise` run-to-run spread;
`rules` two public gates for comparison. Receives counts and outcome arrays, returns numbers.
scipy and numpy are imported inside functions: checking a config must not pay for them.
"""
