// Keys and values as quads of 16 bytes: how many vecs a quad holds and how they are decoded; KEY_ROWS is a vec of a row
// that is written.
// KEY_F32, KEY_F16 or KEY_BF16 says what they are; values have the dtype of the keys.
#ifndef VKATTN_KEY_QUADS
#define VKATTN_KEY_QUADS
#include "elements.glsl"

#if defined(KEY_F32)
#define QUAD_VECS 1
#define KEY_ROWS uvec4
#define key_words to_f32
vec4 quad_vec(uvec4 quad, uint i) { return from_f32(quad); }
#elif defined(KEY_F16)
#define QUAD_VECS 2
#define KEY_ROWS uvec2
#define key_words to_f16
vec4 quad_vec(uvec4 quad, uint i) { return from_f16(i == 0u ? quad.xy : quad.zw); }
#elif defined(KEY_BF16)
#define QUAD_VECS 2
#define KEY_ROWS uvec2
#define key_words to_bf16
vec4 quad_vec(uvec4 quad, uint i) { return from_bf16(i == 0u ? quad.xy : quad.zw); }
#endif

#endif
