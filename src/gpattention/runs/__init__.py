"""Runs and their results: what run folders hold, as THE table that reports, paper tables and plans read.

>>> from gpattention.experiments import read_results
>>> results = read_results(["runs"])
>>> results.frame                    # a pandas DataFrame: one row for every number of every run
>>> results.summary()                # over seeds: mean, standard deviation, standard error
>>> one = results.find("cifar10-cgpt", "clean", "test", "nll")
>>> difference(one, results.find("cifar10-softmax", "clean", "test", "nll")).clear
"""

from gpattention.runs.results import (
    Basis,
    Column,
    Difference,
    Group,
    OverSeeds,
    Results,
    RunData,
    average,
    compared,
    difference,
    difference_from,
    group,
    name_without_seed,
)

__all__ = [
    "Basis",
    "Column",
    "Difference",
    "Group",
    "OverSeeds",
    "Results",
    "RunData",
    "average",
    "compared",
    "difference",
    "difference_from",
    "group",
    "name_without_seed",
]
