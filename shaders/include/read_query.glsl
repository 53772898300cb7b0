// read_query(at): the vec of queries at index `at`, in vecs.
// Includer must include query_out.glsl and params.glsl, and define the buffer `QUERY query[]`.
#ifndef VKATTN_READ_QUERY
#define VKATTN_READ_QUERY
#if defined(QUERY_ANY)
#include "formats.glsl"
vec4 read_query(uint at) {
    uint format = query_format();
    if (format == FORMAT_F32)
        return from_f32(uvec4(query[4u * at], query[4u * at + 1u], query[4u * at + 2u], query[4u * at + 3u]));
    uvec2 words = uvec2(query[2u * at], query[2u * at + 1u]);
    if (format == FORMAT_F16) return from_f16(words);
    return from_bf16(words);
}
#else
vec4 read_query(uint at) { return query_vec(query[at]); }
#endif
#endif
