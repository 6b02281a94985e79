"""CI from jobs: one neutral step model, a template per provider, selection by changed paths.

    templates.py   which providers there are: a file of `ci/providers/` each
    model.py       `Step`, `Pipeline`, and the time limits of a step
    plan.py        lists -> jobs -> shards -> steps
    render.py      pipelines -> the providers' files; `--check`
    select.py      a diff -> the jobs it can have changed

Nothing here starts a server: it reads the same jobs as a run does, so that a pipeline can never
name a job that a run would not find. The command line is `evalsuite/cli_ci.py`.
"""
