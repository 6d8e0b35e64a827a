"""Studies on top of runs and results: the paper's tables, plans of many runs, sweeps, adoption, benchmarks.

Nothing but the command line imports them.
"""
