// Purpose   row softmax with the maximum subtracted
// Maths     weights[j] = e^(scores[j] - m) / l;  m = max_j scores[j], l = sum_j e^(scores[j] - m)
// Bindings  0 params: words 0 and 1 are L and S  1 scores [B H, L, S] float32, rows padded to 4  2 weights, the same
// Grid      any number of workgroups; each takes one row after another, its 128 invocations the elements in turn
// Push      params_base, scores_base, weights_base (words); heads (B H)
// Bounds    the padding of a row is neither read nor written; each row sees a key
// Requires  nothing beyond Vulkan 1.1        Source  our own
#version 450

layout(local_size_x = 128) in;
layout(push_constant) uniform Push {
    uint params_base;
    uint scores_base;
    uint weights_base;
    uint heads;
} push;

layout(set = 0, binding = 0) readonly buffer Params { uint params[]; };
layout(set = 0, binding = 1) coherent readonly buffer Scores { float scores[]; };
layout(set = 0, binding = 2) coherent writeonly buffer Weights { float weights[]; };

shared float parts[128];

float reduced(float own, bool adds) {
    uint at = gl_LocalInvocationIndex;
    parts[at] = own;
    barrier();
    for (uint half_way = 64u; half_way > 0u; half_way /= 2u) {
        if (at < half_way)
            parts[at] = adds ? parts[at] + parts[at + half_way] : max(parts[at], parts[at + half_way]);
        barrier();
    }
    float result = parts[0];
    barrier();
    return result;
}

void main() {
    uint q_len = params[push.params_base], kv_len = params[push.params_base + 1u], stride = (kv_len + 3u) / 4u * 4u;
    uint lane = gl_LocalInvocationIndex;
    for (uint row = gl_WorkGroupID.x; row < push.heads * q_len; row += gl_NumWorkGroups.x) {
        uint from = push.scores_base + row * stride, to = push.weights_base + row * stride;
        float row_max = uintBitsToFloat(0xFF800000u), row_sum = 0.0;
        for (uint j = lane; j < kv_len; j += 128u)
            row_max = max(row_max, scores[from + j]);
        row_max = reduced(row_max, false);
        for (uint j = lane; j < kv_len; j += 128u)
            row_sum += exp(scores[from + j] - row_max);
        row_sum = reduced(row_sum, true);
        for (uint j = lane; j < kv_len; j += 128u)
            weights[to + j] = exp(scores[from + j] - row_max) / row_sum;
    }
}
