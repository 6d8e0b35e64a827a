"""Triton kernel of the gradients of latent inputs, keys and values through the sums over tokens.

    dE_om = Phi_o A_o + Psi_o (dC W_m),   dE_ol = Phi_o (dC^T W_l),   A_o = 2 dG_o W_m
    dE_kl = s_k [Psi_k A_k + V (dP^T W_l)],   dV = Psi_k dP + 2 V d|V|^2,   A_k = 2 dG_k W_l

With one set of inducing inputs the gradient of C = G_o is inside dG_o.
"""
# mypy: disable-error-code="import-not-found,import-untyped,misc,no-untyped-def,untyped-decorator"
# ruff: noqa: ANN001, ANN201

import triton
import triton.language as tl

from gpattention.gp.fused.blocks import fetch, store
from gpattention.gp.fused.sparse.blocks import (
    dot,
    features_backward,
    fetch_turned,
    kernel_values,
    store_tile,
    tile,
    tile_rows,
)


@triton.jit
def latent_backward(
    o, o_n, mask, mask_n, begin, stop, centre, points_m, points_l, W_m, W_l, adjoints, grad, grad_n,
    out_m, out_l, count_m, count_l, C,
    MASKED: tl.constexpr, TWO: tl.constexpr, ROWS: tl.constexpr,
    MP: tl.constexpr, LP: tl.constexpr, CP: tl.constexpr, BACK_CM: tl.constexpr, BACK_CL: tl.constexpr,
):  # fmt: skip
    """Gradients of the latent inputs from begin to stop, and their share of the points'."""
    by_m, by_l = tl.zeros((MP, CP), tl.float32), tl.zeros((LP, CP), tl.float32)
    for start in range(begin, stop, ROWS):
        i, real = tile_rows(start, stop, mask, mask_n, MASKED, ROWS)
        X = tile(o, o_n, i, real, C, CP) - centre[None, :]
        E = kernel_values(X, fetch_turned(points_m, MP, CP), real, count_m, MP)
        phi = dot(E, fetch_turned(W_m, MP, MP))
        by_E = dot(phi, fetch(adjoints, MP, MP))
        if TWO:
            E_l = kernel_values(X, fetch_turned(points_l, LP, CP), real, count_l, LP)
            by_E += dot(dot(E_l, fetch_turned(W_l, LP, LP)), fetch(adjoints + BACK_CM, LP, MP))
            by_x, moved = features_backward(X, by_E * E, points_m, MP, CP)
            by_E_l = dot(phi, fetch(adjoints + BACK_CL, MP, LP))
            by_x_l, moved_l = features_backward(X, by_E_l * E_l, points_l, LP, CP)
            by_x += by_x_l
            by_l += moved_l
        else:
            by_x, moved = features_backward(X, by_E * E, points_m, MP, CP)
        by_m += moved
        store_tile(grad, grad_n, by_x, i, stop, C, CP)
    store(out_m, by_m, MP, CP)
    if TWO:
        store(out_l, by_l, LP, CP)


@triton.jit
def key_backward(
    k, k_n, v, v_n, mask, mask_n, begin, stop, centre, points, W, scale, adjoints, by_square,
    grad_k, grad_k_n, grad_v, grad_v_n, out, count, C, D,
    MASKED: tl.constexpr, ROWS: tl.constexpr, LP: tl.constexpr, CP: tl.constexpr, DP: tl.constexpr,
    BACK_K: tl.constexpr, BACK_P: tl.constexpr, BACK_PW: tl.constexpr,
):  # fmt: skip
    """Gradients of keys and values from begin to stop, and their share of the points'."""
    by_l = tl.zeros((LP, CP), tl.float32)
    for start in range(begin, stop, ROWS):
        i, real = tile_rows(start, stop, mask, mask_n, MASKED, ROWS)
        X = tile(k, k_n, i, real, C, CP) - centre[None, :]
        V = tile(v, v_n, i, real, D, DP)
        E = kernel_values(X, fetch_turned(points, LP, CP), real, count, LP)
        psi = scale * dot(E, fetch_turned(W, LP, LP))
        by_v = dot(psi, fetch(adjoints + BACK_P, LP, DP)) + 2.0 * by_square * V
        store_tile(grad_v, grad_v_n, by_v, i, stop, D, DP)
        by_E = dot(psi, fetch(adjoints + BACK_K, LP, LP)) + dot(V, fetch(adjoints + BACK_PW, DP, LP))
        by_x, moved = features_backward(X, scale * by_E * E, points, LP, CP)
        by_l += moved
        store_tile(grad_k, grad_k_n, by_x, i, stop, C, CP)
    store(out, by_l, LP, CP)


@triton.jit(do_not_specialize=["splits", "programs"])
def keys_backward_kernel(
    k, k_b, k_h, k_n, o, o_b, o_h, o_n, v, v_b, v_h, v_n, mask, mask_b, mask_h, mask_n,
    noise, noise_b, noise_h, scale_k, scale_b, scale_h, by_key, key_b, key_h,
    centres, points_m, points_l, W_m, W_l, adjoints,
    grad_k, grad_k_b, grad_k_h, grad_k_n, grad_o, grad_o_b, grad_o_h, grad_o_n,
    grad_v, grad_v_b, grad_v_h, grad_v_n, shares_m, shares_l,
    splits, length, programs, H, N, count_m, count_l, C, D,
    MASKED: tl.constexpr, TWO: tl.constexpr, POOLED: tl.constexpr, DUAL: tl.constexpr, KEY: tl.constexpr,
    ROWS: tl.constexpr, MP: tl.constexpr, LP: tl.constexpr, CP: tl.constexpr, DP: tl.constexpr,
    BACK_K: tl.constexpr, BACK_P: tl.constexpr, BACK_PW: tl.constexpr, BACK_CM: tl.constexpr,
    BACK_CL: tl.constexpr, BACK_SIZE: tl.constexpr,
):  # fmt: skip
    """Program (s, split, 0): the latent inputs of one split; (s, split, 1): its keys and values.

    Shares [role, S, splits, M, C] of the first set: queries, latent inputs; of the second, or next of the
    only one: keys, and latent inputs again.
    """
    s, split, role = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64), tl.program_id(2)
    b, h = s // H, s % H
    e = h
    if POOLED:
        e = s
    centre = tl.load(centres + e * CP + tl.arange(0, CP))
    adjoints += s * BACK_SIZE
    mask += b * mask_b + h * mask_h
    begin = split * length
    stop = tl.minimum(begin + length, N)
    points_m += 2 * e * MP * CP
    points_l += 2 * e * LP * CP
    W_m += 2 * e * MP * MP
    W_l += 2 * e * LP * LP
    here = s * splits + split
    every = programs.to(tl.int64) * splits
    if role == 0:
        latent_backward(
            o + b * o_b + h * o_h, o_n, mask, mask_n, begin, stop, centre, points_m, points_l, W_m, W_l,
            adjoints, grad_o + b * grad_o_b + h * grad_o_h, grad_o_n, shares_m + (every + here) * MP * CP,
            shares_l + (every + here) * LP * CP, count_m, count_l, C,
            MASKED, TWO, ROWS, MP, LP, CP, BACK_CM, BACK_CL,
        )  # fmt: skip
    else:
        by_square = 0.0
        if KEY:
            sigma = tl.load(noise + b * noise_b + h * noise_h)
            by_square = -0.5 * tl.load(by_key + b * key_b + h * key_h)
            if DUAL:
                by_square = by_square * sigma
            else:
                by_square = by_square / sigma
        key_backward(
            k + b * k_b + h * k_h, k_n, v + b * v_b + h * v_h, v_n, mask, mask_n, begin, stop, centre,
            points_l, W_l, tl.load(scale_k + b * scale_b + h * scale_h), adjoints, by_square,
            grad_k + b * grad_k_b + h * grad_k_h, grad_k_n, grad_v + b * grad_v_b + h * grad_v_h, grad_v_n,
            shares_l + here * LP * CP, count_l, C, D, MASKED, ROWS, LP, CP, DP, BACK_K, BACK_P, BACK_PW,
        )  # fmt: skip
