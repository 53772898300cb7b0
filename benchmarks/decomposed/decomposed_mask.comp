// Purpose   scores times the scale, minus infinity where a row does not see the key (causal, bottom-right)
// Maths     out[r, i, j] = j <= S - L + i ? scale scores[r, i, j] : -inf;  r counts batch entries and heads
// Bindings  0 params: words 0 and 1 are L and S  1 scores [B H, L, S] float32, rows padded to 4  2 out, the same
// Grid      any number of workgroups of 128; each invocation takes one element after another
// Push      params_base, scores_base, out_base (words); heads (B H); scale (float bits)
// Bounds    the padding of a row is neither read nor written
// Requires  nothing beyond Vulkan 1.1        Source  our own
#version 450

layout(local_size_x = 128) in;
layout(push_constant) uniform Push {
    uint params_base;
    uint scores_base;
    uint out_base;
    uint heads;
    uint scale;
} push;

layout(set = 0, binding = 0) readonly buffer Params { uint params[]; };
layout(set = 0, binding = 1) coherent readonly buffer Scores { float scores[]; };
layout(set = 0, binding = 2) coherent writeonly buffer Out { float made[]; };

void main() {
    uint q_len = params[push.params_base], kv_len = params[push.params_base + 1u], stride = (kv_len + 3u) / 4u * 4u;
    uint step = gl_NumWorkGroups.x * gl_WorkGroupSize.x;
    for (uint index = gl_GlobalInvocationID.x; index < push.heads * q_len * kv_len; index += step) {
        uint row = index / kv_len, j = index % kv_len, at = row * stride + j;
        bool seen = j + q_len <= kv_len + row % q_len;
        made[push.out_base + at] =
            seen ? uintBitsToFloat(push.scale) * scores[push.scores_base + at] : uintBitsToFloat(0xFF800000u);
    }
}
