"""Kernels keep to what the oldest Triton that we run on (3.6) compiles; newer ones take more."""

import ast
from pathlib import Path

import gpattention.ops

KERNELS = sorted(Path(gpattention.ops.__file__).parent.rglob("*.py"))


def is_compiled(node: ast.AST) -> bool:
    return isinstance(node, ast.FunctionDef) and any("jit" in ast.unparse(d) for d in node.decorator_list)


def test_names_are_unpacked_one_tuple_at_a_time() -> None:
    compiled = [(f, n) for f in KERNELS for n in ast.walk(ast.parse(f.read_text())) if is_compiled(n)]
    assert len(compiled) > 30  # it looks where the kernels are
    nested = [
        f"{file.parent.name}/{file.name}:{node.lineno}"
        for file, kernel in compiled
        for node in ast.walk(kernel)
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Tuple) and any(isinstance(e, ast.Tuple | ast.List) for e in target.elts)
    ]
    assert nested == []
