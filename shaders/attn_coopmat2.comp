// Purpose   attn_coopmat with the operations of VK_NV_cooperative_matrix2 for the softmax: row reductions, functions of
//           elements, and accumulators that become operands, so that scores stay in registers whatever their order
// Maths     as attn_coopmat
// Bindings  as attn_coopmat
// Grid      as attn_coopmat: workgroups of 4 or 8 subgroups, each with EDGE rows
// Push      as attn_coopmat
// Bounds    as attn_coopmat
// Requires  matrices of EDGE x EDGE x EDGE at subgroup scope and subgroups of LANES; reductions, conversions and
//           functions of elements
// Source    Dao 2023 (arXiv 2307.08691); Shah et al. 2024 (arXiv 2407.08608); Milakov and Gimelshein 2018
#version 450
#extension GL_GOOGLE_include_directive : require
#extension GL_EXT_control_flow_attributes : require
#extension GL_KHR_memory_scope_semantics : require
#extension GL_KHR_cooperative_matrix : require
#extension GL_NV_cooperative_matrix2 : require
#extension GL_KHR_shader_subgroup_basic : require
#extension GL_KHR_shader_subgroup_vote : require
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
#endif
#if defined(WIDTH_D64)
#define WIDTH 64u
#elif defined(WIDTH_D128)
#define WIDTH 128u
#endif
#if defined(LANES_L8)
#define SUBGROUPS 4u
#define BLOCK_KEYS 16u
#else
#define SUBGROUPS 8u
#define BLOCK_KEYS 64u
#endif
#define THREADS (SUBGROUPS * LANES)
#define BLOCK_ROWS (SUBGROUPS * EDGE)
layout(local_size_x = THREADS) in;
#include "coopmat.glsl"
#include "weigh_reduce.glsl"
#include "coopmat_main.glsl"
