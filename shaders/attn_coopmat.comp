// Purpose   attention in one dispatch on matrix units, for prefill: operands in half precision, sums in float32
// Maths     s_j = masked score (include/score.glsl) in base 2;  m' = max(m, max_j s_j), or in registers m as long as no
//           s_j > m + 3, and a whole number above the scores otherwise;  p_j = 2^(s_j-m'+12)
//           l' = l 2^(m-m') + sum_j p_j;  acc' = acc 2^(m-m') + sum_j half(p_j) v_j, a tile of keys at a time
//           out = acc / l;  lse = (m - 12) ln 2 + ln l. In bfloat16, p_j goes in as two parts, the second what rounding
//           the first left. A row with nothing to attend gives 0 and lse = minus infinity (or the sink); one with a
//           score that is NaN or plus infinity gives NaN
// Bindings  0 params  1 query [B, H, L, D] quads  2 key [B, Hkv, S, D] quads  3 value [B, Hkv, S, Ev] quads  4 mask,
//           broadcast to [B, H, L, S]  5 out [B, H, L, Ev]  6 lse [B, H, L] float32, rows padded to 4 with 0, written
//           if FLAG_LSE is set. Strides are in params
// Grid      any number of workgroups of 4 or 8 subgroups; each takes BLOCK_ROWS rows after another, the rows that see
//           most keys first. A subgroup has EDGE rows: their queries, scores and sums are matrices in registers.
//           Tiles of keys and values are staged for all; include/coopmat_main.glsl says what overlaps
// Push      params_base (words); chunk (of tiles_per_chunk row tiles); query_base, key_base, value_base (vecs);
//           mask_base (words); out_base (vecs); lse_base (words)
// Bounds    keys and values outside the tile's visible range are not read, nor rows beyond q_len. A tile of keys that
//           the mask closes for all rows is not read either. Values that are not finite are multiplied as 0 in a tile
//           of which some row does not see all, and added by themselves to the rows that attend them
// Requires  matrices of EDGE x EDGE x EDGE at subgroup scope and subgroups of LANES. rows = quad: the order of elements
//           in include/weigh_quad.glsl, which the self-test finds out; rows = shared: scores go through shared memory
// Source    Dao 2023 (arXiv 2307.08691); Shah et al. 2024 (arXiv 2407.08608), for the overlap; Milakov and Gimelshein
//           2018
#version 450
#extension GL_GOOGLE_include_directive : require
#extension GL_EXT_control_flow_attributes : require
#extension GL_KHR_memory_scope_semantics : require
#extension GL_KHR_cooperative_matrix : require
#extension GL_KHR_shader_subgroup_basic : require
#extension GL_KHR_shader_subgroup_vote : require
#extension GL_KHR_shader_subgroup_shuffle : require
#extension GL_EXT_shader_explicit_arithmetic_types_float16 : require
#if defined(DTYPE_BF16)
#extension GL_EXT_bfloat16 : require
#endif

#if defined(LANES_L8)
#define LANES 8u
#define EDGE 8u
#elif defined(LANES_L32)
#define LANES 32u
#define EDGE 16u
#elif defined(LANES_L64)
#define LANES 64u
#define EDGE 16u
#endif
#if defined(WIDTH_D64)
#define WIDTH 64u
#elif defined(WIDTH_D128)
#define WIDTH 128u
#elif defined(WIDTH_D256)
#define WIDTH 256u
#endif
#if defined(ROWS_QUAD)
#define SUBGROUPS 8u
#if defined(WIDTH_D256)
#define BLOCK_KEYS 16u
#else
#define BLOCK_KEYS 64u
#endif
#else
#define SUBGROUPS 4u
#if defined(WIDTH_D64)
#define BLOCK_KEYS 32u
#else
#define BLOCK_KEYS 16u
#endif
#endif
#define THREADS (SUBGROUPS * LANES)
#define BLOCK_ROWS (SUBGROUPS * EDGE)
layout(local_size_x = THREADS) in;
#include "coopmat.glsl"
#if defined(ROWS_QUAD)
#include "weigh_quad.glsl"
#else
#include "weigh_shared.glsl"
#endif
#include "coopmat_main.glsl"
