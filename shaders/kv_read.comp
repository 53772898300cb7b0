// Purpose   cache read-back: packs the live rows of one layer's keys or values for the host, bit for bit
// Maths     rows[b, j, h, :] = cache[b, h, j, :] for j < kv_len(b), and 0 for kv_len(b) <= j < max_kv_len
// Bindings  0 params (k_stride_*, key_offset describe the cache)  1 cache [B, Hkv, capacity, D], in quads of 16 bytes
//           2 rows [B, max_kv_len, Hkv, D], in quads
// Grid      any number of workgroups of 64; each invocation takes one quad after another
// Push      params_base (words); cache_base, rows_base (quads)
// Bounds    rows at or beyond kv_len(b) are not read
// Requires  nothing beyond Vulkan 1.1        Source  our own
#version 450
#extension GL_GOOGLE_include_directive : require

layout(local_size_x = 64) in;
layout(push_constant) uniform Push {
    uint params_base;
    uint cache_base;
    uint rows_base;
} push;

#include "params.glsl"
layout(set = 0, binding = 1) restrict readonly buffer Cache { uvec4 cache[]; };
layout(set = 0, binding = 2) coherent writeonly buffer Rows { uvec4 rows[]; };

void main() {
    uint row_quads = k_stride_row();
    uint quads = batch_size() * max_kv_len() * num_kv_heads() * row_quads;
    uint step = gl_NumWorkGroups.x * gl_WorkGroupSize.x;
    for (uint index = gl_GlobalInvocationID.x; index < quads; index += step) {
        uint row = index / row_quads;
        uint h = row % num_kv_heads(), j = row / num_kv_heads() % max_kv_len();
        uint b = row / (num_kv_heads() * max_kv_len());
        uvec4 quad = uvec4(0u);
        if (j < kv_len(b))
            quad = cache[push.cache_base + key_offset() + b * k_stride_batch() + h * k_stride_head() + j * row_quads
                         + index % row_quads];
        rows[push.rows_base + index] = quad;
    }
}
