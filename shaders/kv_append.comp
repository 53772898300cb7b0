// Purpose   cache update: writes q_len new rows of keys and of values at input_pos(b), exactly those rows
// Maths     key_cache[b, h, input_pos(b) + i, :] = round(new_key[b, h, i, :]),  0 <= i < q_len;  values alike
// Bindings  0 params  1 new_key [B, Hkv, L, D]  2 new_value [B, Hkv, L, Ev]  3 key_cache [B, Hkv, capacity, D]
//           4 value_cache [B, Hkv, capacity, Ev], where the layer starts at key_offset, value_offset. Strides in params
// Grid      any number of workgroups of 64; each invocation takes one vec after another, keys first
// Push      params_base (words); new_key_base, new_value_base, key_base, value_base (vecs)
// Bounds    the host has checked that every input_pos(b) + q_len is within capacity. A row's padding is written 0
// Requires  nothing beyond Vulkan 1.1        Source  ExecuTorch's update_cache, without its rounded-up row count
#version 450
#extension GL_GOOGLE_include_directive : require

layout(local_size_x = 64) in;
layout(push_constant) uniform Push {
    uint params_base;
    uint new_key_base;
    uint new_value_base;
    uint key_base;
    uint value_base;
} push;

#include "elements.glsl"
#if defined(SOURCE_F32)
#define SOURCE uvec4
#define source_vec from_f32
#elif defined(SOURCE_F16)
#define SOURCE uvec2
#define source_vec from_f16
#elif defined(SOURCE_BF16)
#define SOURCE uvec2
#define source_vec from_bf16
#endif
#if defined(CACHE_F32)
#define CACHE uvec4
#define cache_words to_f32
#elif defined(CACHE_F16)
#define CACHE uvec2
#define cache_words to_f16
#elif defined(CACHE_BF16)
#define CACHE uvec2
#define cache_words to_bf16
#endif

#include "params.glsl"
layout(set = 0, binding = 1) restrict readonly buffer NewKey { SOURCE new_key[]; };
layout(set = 0, binding = 2) restrict readonly buffer NewValue { SOURCE new_value[]; };
layout(set = 0, binding = 3) coherent writeonly buffer KeyCache { CACHE key_cache[]; };
layout(set = 0, binding = 4) coherent writeonly buffer ValueCache { CACHE value_cache[]; };

// One vec of one row; row_vecs is the length of a row in the cache, padding included.
struct Place {
    uint b, h, i, e;
};

Place place(uint index, uint row_vecs) {
    uint row = index / row_vecs;
    return Place(row / (num_kv_heads() * q_len()), row / q_len() % num_kv_heads(), row % q_len(), index % row_vecs);
}

void main() {
    uint rows = batch_size() * num_kv_heads() * q_len();
    uint keys = rows * k_stride_row(), values = rows * v_stride_row();
    uint step = gl_NumWorkGroups.x * gl_WorkGroupSize.x;
    for (uint index = gl_GlobalInvocationID.x; index < keys + values; index += step) {
        bool is_key = index < keys;
        Place at = place(is_key ? index : index - keys, is_key ? k_stride_row() : v_stride_row());
        uint token = input_pos(at.b) + at.i;
        vec4 x = vec4(0.0);
        if (is_key) {
            uint from = push.new_key_base + at.b * new_k_stride_batch() + at.h * new_k_stride_head()
                        + at.i * new_k_stride_row() + at.e;
            if (at.e < head_vecs()) x = source_vec(new_key[from]);
            key_cache[push.key_base + key_offset() + at.b * k_stride_batch() + at.h * k_stride_head()
                      + token * k_stride_row() + at.e] = cache_words(x);
        } else {
            uint from = push.new_value_base + at.b * new_v_stride_batch() + at.h * new_v_stride_head()
                        + at.i * new_v_stride_row() + at.e;
            if (at.e < value_vecs()) x = source_vec(new_value[from]);
            value_cache[push.value_base + value_offset() + at.b * v_stride_batch() + at.h * v_stride_head()
                        + token * v_stride_row() + at.e] = cache_words(x);
        }
    }
}
