"""Triton kernel of the sparse model's roots: R = L^-1 of I + G / sigma^2 = L L^T for G_o, G_k and G_q.

They wait for nothing but the sums over tokens, so each has a program of its own, of few warps: pivots come
one after another, and threads that wait for one another at every pivot make none of them faster.
"""
# mypy: disable-error-code="import-not-found,import-untyped,misc,no-untyped-def,untyped-decorator"
# ruff: noqa: ANN001, ANN201

import triton
import triton.language as tl

from gpattention.gp.fused.blocks import fetch
from gpattention.gp.fused.sparse.blocks import note_failure, one_plus, root_of, turn


@triton.jit(do_not_specialize=["counted", "programs"])
def roots_kernel(
    sums, noise, noise_b, noise_h, factors, info, counter, counted, programs, H,
    MP: tl.constexpr, LP: tl.constexpr,
    SUM_K: tl.constexpr, SUM_Q: tl.constexpr, SUM_SIZE: tl.constexpr,
    FACTOR_RT: tl.constexpr, FACTOR_RL: tl.constexpr, FACTOR_RQ: tl.constexpr, FACTOR_DET: tl.constexpr,
    FACTOR_SIZE: tl.constexpr,
):  # fmt: skip
    """Program (i, which): root and log determinant for G_o (0, with R^T), G_k (1) or G_q (2)."""
    i, which = tl.program_id(0).to(tl.int64), tl.program_id(1)
    s = tl.load(noise + i // H * noise_b + i % H * noise_h)
    sums += i * SUM_SIZE
    factors += i * FACTOR_SIZE
    info += i
    if which == 1:
        log_det, failed = root_of(one_plus(fetch(sums + SUM_K, LP, LP), s, LP), factors + FACTOR_RL, LP)
        info += programs
    else:
        at, to = 0, 0
        if which == 2:
            at, to = SUM_Q, FACTOR_RQ
            info += 3 * programs
        log_det, failed = root_of(one_plus(fetch(sums + at, MP, MP), s, MP), factors + to, MP)
        if which == 0:
            turn(factors + FACTOR_RT, factors, MP, MP)
    tl.store(factors + FACTOR_DET + which, log_det)
    note_failure(info, counter, counted, failed)
