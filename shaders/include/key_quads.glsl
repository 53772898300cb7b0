// Keys and values as quads of 16 bytes: how many vecs a quad holds, how they are decoded, and whether all is finite.
// KEY_F32, KEY_F16 or KEY_BF16 says what they are; values have the dtype of the keys.
#ifndef VKATTN_KEY_QUADS
#define VKATTN_KEY_QUADS
#include "elements.glsl"

#if defined(KEY_F32)
#define QUAD_VECS 1
vec4 quad_vec(uvec4 quad, uint i) { return from_f32(quad); }
#elif defined(KEY_F16)
#define QUAD_VECS 2
vec4 quad_vec(uvec4 quad, uint i) { return from_f16(i == 0u ? quad.xy : quad.zw); }
#elif defined(KEY_BF16)
#define QUAD_VECS 2
vec4 quad_vec(uvec4 quad, uint i) { return from_bf16(i == 0u ? quad.xy : quad.zw); }
#endif

// Not 0 if the quad holds an infinity or a NaN: only then does adding 1 to an exponent's last bit carry out of it.
uint not_finite(uvec4 quad) {
#if defined(KEY_F32)
    uvec4 carry = ((quad & 0x7F800000u) + 0x00800000u) & 0x80000000u;
#elif defined(KEY_F16)
    uvec4 carry = ((quad & 0x7C007C00u) + 0x04000400u) & 0x80008000u;
#elif defined(KEY_BF16)
    uvec4 carry = ((quad & 0x7F807F80u) + 0x00800080u) & 0x80008000u;
#endif
    return carry.x | carry.y | carry.z | carry.w;
}
#endif
