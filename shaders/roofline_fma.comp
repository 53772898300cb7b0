// Purpose   fused multiply-adds and nothing else: what vkattn bench takes for the rate of float32 arithmetic
// Maths     32 sums: s_i = s_i a + b, rounds times; out[invocation] = sum_i s_i
// Bindings  0 out, a float for each invocation
// Grid      any number of workgroups of 128; 64 rounds operations an invocation
// Push      rounds; a and b (float bits), so that the compiler does not know them
// Bounds    one float an invocation is written
// Requires  nothing beyond Vulkan 1.1        Source  our own
#version 450
#extension GL_EXT_control_flow_attributes : require

layout(local_size_x = 128) in;
layout(push_constant) uniform Push {
    uint rounds;
    uint a;
    uint b;
} push;

layout(set = 0, binding = 0) writeonly buffer Out { float made[]; };

void main() {
    vec4 a = vec4(uintBitsToFloat(push.a)), b = vec4(uintBitsToFloat(push.b));
    vec4 sums[8];
    [[unroll]] for (uint i = 0u; i < 8u; ++i)
        sums[i] = vec4(float(gl_LocalInvocationIndex + i));
    for (uint round = 0u; round < push.rounds; ++round)
        [[unroll]] for (uint i = 0u; i < 8u; ++i)
            sums[i] = fma(sums[i], a, b);
    vec4 total = vec4(0.0);
    [[unroll]] for (uint i = 0u; i < 8u; ++i)
        total += sums[i];
    made[gl_GlobalInvocationID.x] = total.x + total.y + total.z + total.w;
}
