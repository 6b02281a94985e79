"""Where jobs run: one after the other here (`local`), or on a Ray cluster (`ray`).

Receives jobs and a run; calls back with each verdict. One job's line is `pipeline.py`.
"""
