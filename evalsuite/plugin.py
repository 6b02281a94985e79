"""pytest plugin: `pytest evalsuite --config config-cpu.txt`.

Receives pytest's command line; adds options and fixtures only to runs that name `evalsuite`.
"""
