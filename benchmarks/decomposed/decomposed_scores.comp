// Purpose   matmul of queries and transposed keys
// Maths     scores[r, i, j] = sum_d q[r, i, d] k[r, j, d];  r counts batch entries and heads
// Bindings  0 params: words 0 and 1 are L and S  1 q [B H, L, D] float16  2 k [B H, S, D] float16
//           3 scores [B H, L, S] float32, rows padded to 4
// Grid      any number of workgroups; each takes one block of 32 keys after another, 4 lanes to a key. A lane group
//           reads its key row in pieces of 64 contiguous bytes; the four sums of a key meet in shared memory
// Push      params_base, q_base, k_base, scores_base (words); heads (B H), head_quads (quads of D)
// Bounds    keys at or beyond S are not read; the padding of a row is not written
// Requires  nothing beyond Vulkan 1.1        Source  our own
#version 450

layout(local_size_x = 128) in;
layout(push_constant) uniform Push {
    uint params_base;
    uint q_base;
    uint k_base;
    uint scores_base;
    uint heads;
    uint head_quads;
} push;

const uint LANES = 4u, KEYS = 32u;

layout(set = 0, binding = 0) readonly buffer Params { uint params[]; };
layout(set = 0, binding = 1) coherent readonly buffer Queries { uvec4 queries[]; };
layout(set = 0, binding = 2) coherent readonly buffer Keys { uvec4 keys[]; };
layout(set = 0, binding = 3) coherent writeonly buffer Scores { float scores[]; };

shared float sums[128];

float product(uvec4 a, uvec4 b) {
    float sum = 0.0;
    for (uint word = 0u; word < 4u; ++word)
        sum += dot(unpackHalf2x16(a[word]), unpackHalf2x16(b[word]));
    return sum;
}

void main() {
    uint q_len = params[push.params_base], kv_len = params[push.params_base + 1u];
    uint blocks = (kv_len + KEYS - 1u) / KEYS, stride = (kv_len + 3u) / 4u * 4u;
    uint at = gl_LocalInvocationIndex, lane = at % LANES;
    for (uint item = gl_WorkGroupID.x; item < push.heads * q_len * blocks; item += gl_NumWorkGroups.x) {
        uint row = item / blocks, j = item % blocks * KEYS + at / LANES;
        float sum = 0.0;
        if (j < kv_len) {
            uint query = push.q_base / 4u + row * push.head_quads;
            uint key = push.k_base / 4u + (row / q_len * kv_len + j) * push.head_quads;
            for (uint quad = lane; quad < push.head_quads; quad += LANES)
                sum += product(queries[query + quad], keys[key + quad]);
        }
        sums[at] = sum;
        barrier();
        if (lane == 0u && j < kv_len)
            scores[push.scores_base + row * stride + j] = sums[at] + sums[at + 1u] + sums[at + 2u] + sums[at + 3u];
        barrier();
    }
}
