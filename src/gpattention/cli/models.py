"""`gpattention models` and `gpattention completion`."""

import shlex
from pathlib import Path
from typing import Annotated, Literal

import typer

from gpattention.attention import attention_class, list_attention
from gpattention.cli.console import say, table
from gpattention.cli.main import App
from gpattention.cli.options import Out
from gpattention.studies.model_card import write_model_card, write_shared_run

app = App()

models = App(invoke_without_command=True, no_args_is_help=False)
app.add_typer(models, name="models")


@models.callback()
def list_kinds(ctx: typer.Context) -> None:
    """List kinds of attention, or share a trained model.

    Examples:
      gpattention models                                                        list kinds of attention
      gpattention models card runs/cifar10-60/cifar10-cgpt-seed0 -o shared/cifar10-cgpt
      gpattention models run results/models/cifar10-direct-rows -o runs/shared  evaluate a shared model
    """
    if ctx.invoked_subcommand is not None:
        return
    rows = []
    for kind in list_attention():
        cls = attention_class(kind)
        flags = (cls.draws, cls.crosses, cls.causal_form, cls.normalizes)
        rows.append([kind, *("yes" if flag else "no" for flag in flags), ", ".join(cls.regularizers)])
    print(table(["kind", "draws", "cross", "causal", "rows", "regularisers"], rows))


@models.command("card")
def card(run: str, out: Annotated[str, Out], name: str | None = None) -> None:
    """Copy a run's model and write its card.

    Options:
        run (RUN): a run folder.
        out (FOLDER): where the model goes.
        name (TEXT): name of the model (default: that of the recipe).

    Examples:
      gpattention models card runs/digits-cgp -o results/models/digits-cgp
      gpattention models card runs/cifar10-60/cifar10-cgpt-seed0 -o shared/cgpt --name "CGPT on CIFAR-10"

    Copies config.json, model.safetensors (3 MB at most) and preprocessing/, and writes recipe.toml and
    README.md with the measures of the run's evaluation. `gpattention predict`, from_pretrained and
    load_preprocessing take the folder.
    """
    _list_files(write_model_card(run, out, name=name))


@models.command("run")
def shared(model: str, out: Annotated[str, Out]) -> None:
    """Make a run folder of a shared model, to evaluate it.

    Options:
        model (MODEL): a folder that models card made.
        out (RUN): the run folder to make.

    Examples:
      gpattention models run results/models/cifar10-direct-rows -o runs/shared
      gpattention evaluate runs/shared --suite clean,corrupted --data ~/data

    The way back of `models card`: a run folder that evaluate, report and adopt take. What training wrote down
    is not shared: such a run has no curves, and training cannot go on with it.
    """
    _list_files(write_shared_run(model, out))
    say(f"evaluate it with: gpattention evaluate {shlex.quote(out)}")


def _list_files(files: list[Path]) -> None:
    for file in files:
        say(f"{file} ({file.stat().st_size / 1e3:.1f} kB)")


@app.command("completion")
def completion(shell: Annotated[Literal["bash", "zsh", "fish"], typer.Argument()]) -> None:
    """Print a script for your shell's completion.

    Examples:
      mkdir -p ~/.local/share/bash-completion/completions
      gpattention completion bash > ~/.local/share/bash-completion/completions/gpattention

      mkdir -p ~/.zfunc                  and in ~/.zshrc, before compinit: fpath+=~/.zfunc
      gpattention completion zsh > ~/.zfunc/_gpattention

      gpattention completion fish > ~/.config/fish/completions/gpattention.fish

    To try it in a bash that is open: eval "$(gpattention completion bash)"
    """
    from typer._completion_shared import get_completion_script

    print(get_completion_script(prog_name="gpattention", complete_var="_GPATTENTION_COMPLETE", shell=shell))
