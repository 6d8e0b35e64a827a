"""Runs: recipes, run folders, their records, the preparation of inputs, and THE table of results.

>>> from gpattention.runs import load_recipe, open_run, read_results
>>> recipe = load_recipe("recipes/digits-cgp.toml", ["phases.epochs=30"])
>>> run = open_run("runs/digits-cgp")  # a model, its recipe, and what happened
>>> results = read_results(["runs"])
>>> results.frame  # a pandas DataFrame: one row for every number of every run
>>> results.summary()  # over seeds: mean, standard deviation, standard error
>>> one = results.find("cifar10-cgpt", "clean", "test", "nll")
>>> difference(one, results.find("cifar10-softmax", "clean", "test", "nll")).clear
"""

from gpattention.models.predict import Progress
from gpattention.runs.folder import (
    Run,
    distinct_names,
    find_runs,
    open_run,
    open_trained,
    read_results,
    read_run,
    read_runs,
)
from gpattention.runs.inputs import (
    Contextual,
    Prepared,
    Preprocessing,
    TextEncoder,
    TrainingData,
    image_training_data,
    load_preprocessing,
    open_contextual,
    prepare,
    save_preprocessing,
    sentence_words,
    text_training_data,
)
from gpattention.runs.recipe import (
    CheckpointRecipe,
    DataRecipe,
    ModelRecipe,
    OptimizerRecipe,
    PhaseRecipe,
    Recipe,
    RegularizerRecipe,
    change_recipe,
    check_seed,
    load_recipe,
    read_recipe,
    recipe_from_dict,
    with_seed,
    write_recipe,
)
from gpattention.runs.records import (
    OTHER_WEIGHTS,
    Record,
    SuiteResult,
    append_event,
    chosen_row,
    read_events,
    read_suites,
    recorded_settings,
    write_metrics,
    write_suite,
)
from gpattention.runs.results import (
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
    "OTHER_WEIGHTS", "CheckpointRecipe", "Column", "Contextual", "DataRecipe", "Difference", "Group",
    "ModelRecipe", "OptimizerRecipe", "OverSeeds", "PhaseRecipe", "Prepared", "Preprocessing", "Progress",
    "Recipe", "Record", "RegularizerRecipe", "Results", "Run", "RunData", "SuiteResult", "TextEncoder",
    "TrainingData", "append_event", "average", "change_recipe", "check_seed", "chosen_row", "compared",
    "difference", "difference_from", "distinct_names", "find_runs", "group", "image_training_data",
    "load_preprocessing", "load_recipe", "name_without_seed", "open_contextual", "open_run", "open_trained",
    "prepare", "read_events", "read_recipe", "read_results", "read_run", "read_runs", "read_suites",
    "recipe_from_dict", "recorded_settings", "save_preprocessing", "sentence_words", "text_training_data",
    "with_seed", "write_metrics", "write_recipe", "write_suite",
]  # fmt: skip
