// read_query(at): the vec of queries at index `at`, in vecs.
// Includer must include query_out.glsl and params.glsl, and define the buffer `QUERY query[]`.
#ifndef VKATTN_READ_QUERY
#define VKATTN_READ_QUERY
#if defined(QUERY_ANY)
#include "formats.glsl"
vec4 read_query(uint at) {
    uint format = query_format(), from = (format == FORMAT_F32 ? 4u : 2u) * at;
    uvec2 words = uvec2(query[from], query[from + 1u]);  // all dtypes share them: loads are a lot of code in a CPU
    if (format == FORMAT_F32) return from_f32(uvec4(words, query[from + 2u], query[from + 3u]));
    if (format == FORMAT_F16) return from_f16(words);
    return from_bf16(words);
}
#else
vec4 read_query(uint at) { return query_vec(query[at]); }
#endif
#endif
