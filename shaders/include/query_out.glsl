// Queries and outputs, which have one dtype: QUERY_F32, QUERY_F16 or QUERY_BF16, or QUERY_ANY for one that is known at
// run time only. In buffers they are vecs, or words if any dtype will do.
#ifndef VKATTN_QUERY_OUT
#define VKATTN_QUERY_OUT
#include "elements.glsl"
#if defined(QUERY_F32)
#define QUERY uvec4
#define query_vec from_f32
#define out_words to_f32
#elif defined(QUERY_F16)
#define QUERY uvec2
#define query_vec from_f16
#define out_words to_f16
#elif defined(QUERY_BF16)
#define QUERY uvec2
#define query_vec from_bf16
#define out_words to_bf16
#elif defined(QUERY_ANY)
#define QUERY uint
#endif
#endif
