// Purpose   matmul of weights and values
// Maths     out[r, i, d] = sum_j weights[r, i, j] v[r, j, d];  r counts batch entries and heads
// Bindings  0 params: words 0 and 1 are L and S  1 weights [B H, L, S] float32, rows padded to 4
//           2 v [B H, S, D] float16  3 out [B H, L, D] float16
// Grid      any number of workgroups; each takes one row's block of 4 quads (32 elements of D) after another. Its
//           invocations are 4 quads by 32 lanes of keys; the sums of the lanes meet in shared memory
// Push      params_base, weights_base, v_base, out_base (words); heads (B H), head_quads (quads of D)
// Bounds    values at or beyond S are not read
// Requires  nothing beyond Vulkan 1.1        Source  our own
#version 450

layout(local_size_x = 128) in;
layout(push_constant) uniform Push {
    uint params_base;
    uint weights_base;
    uint v_base;
    uint out_base;
    uint heads;
    uint head_quads;
} push;

const uint QUADS = 4u, LANES = 32u;

layout(set = 0, binding = 0) readonly buffer Params { uint params[]; };
layout(set = 0, binding = 1) coherent readonly buffer Weights { float weights[]; };
layout(set = 0, binding = 2) coherent readonly buffer Values { uvec4 values[]; };
layout(set = 0, binding = 3) coherent writeonly buffer Out { uvec4 made[]; };

shared vec4 low[128];
shared vec4 high[128];

void main() {
    uint q_len = params[push.params_base], kv_len = params[push.params_base + 1u], stride = (kv_len + 3u) / 4u * 4u;
    uint blocks = (push.head_quads + QUADS - 1u) / QUADS, at = gl_LocalInvocationIndex;
    for (uint item = gl_WorkGroupID.x; item < push.heads * q_len * blocks; item += gl_NumWorkGroups.x) {
        uint row = item / blocks, quad = item % blocks * QUADS + at % QUADS;
        vec4 first = vec4(0.0), second = vec4(0.0);
        for (uint j = at / QUADS; j < kv_len && quad < push.head_quads; j += LANES) {
            uvec4 eight = values[push.v_base / 4u + (row / q_len * kv_len + j) * push.head_quads + quad];
            float weight = weights[push.weights_base + row * stride + j];
            first += weight * vec4(unpackHalf2x16(eight.x), unpackHalf2x16(eight.y));
            second += weight * vec4(unpackHalf2x16(eight.z), unpackHalf2x16(eight.w));
        }
        low[at] = first;
        high[at] = second;
        barrier();
        for (uint half_way = 64u; half_way >= QUADS; half_way /= 2u) {
            if (at < half_way) {
                low[at] += low[at + half_way];
                high[at] += high[at + half_way];
            }
            barrier();
        }
        if (at < QUADS && quad < push.head_quads)
            made[push.out_base / 4u + row * push.head_quads + quad] =
                uvec4(packHalf2x16(low[at].xy), packHalf2x16(low[at].zw), packHalf2x16(high[at].xy),
                      packHalf2x16(high[at].zw));
        barrier();
    }
}
