// What keys and values are stored as: KEY_F32, KEY_F16, KEY_BF16, KEY_INT8, KEY_Q8_0, KEY_Q4_0, or KEY_MIXED for
// formats that are known at run time only. KEY is the element of their buffers: a vec of floats, else a word.
#ifndef VKATTN_KEY_FORMAT
#define VKATTN_KEY_FORMAT
#include "elements.glsl"
#if defined(KEY_F32)
#define KEY uvec4
#define key_vec from_f32
#elif defined(KEY_F16)
#define KEY uvec2
#define key_vec from_f16
#elif defined(KEY_BF16)
#define KEY uvec2
#define key_vec from_bf16
#else
#define KEY uint
#define KEY_QUANTISED
#endif
#endif
