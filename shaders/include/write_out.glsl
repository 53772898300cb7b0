// write_output(at, x): store vec x of the output at index `at`, in vecs.
// Includer must include query_out.glsl and params.glsl, and define the buffer `QUERY outputs[]`.
#ifndef VKATTN_WRITE_OUT
#define VKATTN_WRITE_OUT
#if defined(QUERY_ANY)
#include "formats.glsl"
void write_output(uint at, vec4 x) {
    uint format = query_format();
    if (format == FORMAT_F32) {
        uvec4 words = to_f32(x);
        for (uint i = 0u; i < 4u; ++i) outputs[4u * at + i] = words[i];
    } else {
        uvec2 words = format == FORMAT_F16 ? to_f16(x) : to_bf16(x);
        outputs[2u * at] = words.x;
        outputs[2u * at + 1u] = words.y;
    }
}
#else
void write_output(uint at, vec4 x) { outputs[at] = out_words(x); }
#endif
#endif
