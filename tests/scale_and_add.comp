#version 450
layout(local_size_x = 32) in;
layout(push_constant) uniform Push { uint params_base, a_base, b_base, out_base, factor; } push;
layout(set = 0, binding = 0) readonly buffer Params { uint params[]; };
layout(set = 0, binding = 1) coherent readonly buffer A { uint a[]; };
layout(set = 0, binding = 2) coherent readonly buffer B { uint b[]; };
layout(set = 0, binding = 3) coherent writeonly buffer Out { uint result[]; };
void main() {  // result = factor a + b, for float32 rows of 8, as many as params says
    uint words = 8u * params[push.params_base] * params[push.params_base + 1u];
    for (uint i = gl_GlobalInvocationID.x; i < words; i += gl_NumWorkGroups.x * gl_WorkGroupSize.x) {
        float sum = uintBitsToFloat(push.factor) * uintBitsToFloat(a[push.a_base + i])
                    + uintBitsToFloat(b[push.b_base + i]);
        result[push.out_base + i] = floatBitsToUint(sum);
    }
}
