// Matrices of a subgroup of 32 as NVIDIA lays them out: which element a component of an invocation is. No rule of Vulkan
// says so: the self-test of a kernel does. Lane n = 4 g + t:
//   A, 16 x 16     component i: row g + 8 (i / 4), column 8 (i / 2 % 2) + 2 t + i % 2
//   B, 16 x 8      component i: row 8 (i / 2) + 2 t + i % 2, column g
//   sums, 16 x 8   component i: row g + 8 (i / 2), column 2 t + i % 2
#ifndef VKATTN_MATRIX_UNITS
#define VKATTN_MATRIX_UNITS

#if defined(EMULATED)
// For devices without: a workgroup of 32 is the subgroup.
#define UNROLL
#define HALF float
#define HALF2 vec2
HALF2 halves(uint bits) { return unpackHalf2x16(bits); }
uint half_words(vec2 x) { return packHalf2x16(x); }
HALF2 rounded(vec2 x) { return unpackHalf2x16(packHalf2x16(x)); }
struct LEFT { HALF c[8]; };
struct RIGHT { HALF c[4]; };
struct SUMS { float c[4]; };
#define PART(m, i) m.c[i]
#define LANE gl_LocalInvocationIndex
#define SUBGROUP 0u
#define SUBGROUPS 1u
shared float left_of[256], right_of[128];
shared uint swapped[32];
#define G (LANE / 4u)
#define T (LANE % 4u)
SUMS multiply_add(LEFT a, RIGHT b, SUMS c) {
    for (uint i = 0u; i < 8u; ++i)
        left_of[(G + 8u * (i / 4u)) * 16u + 8u * (i / 2u % 2u) + 2u * T + i % 2u] = a.c[i];
    for (uint i = 0u; i < 4u; ++i) right_of[(8u * (i / 2u) + 2u * T + i % 2u) * 8u + G] = b.c[i];
    barrier();
    for (uint i = 0u; i < 4u; ++i)
        for (uint k = 0u; k < 16u; ++k)
            c.c[i] += left_of[(G + 8u * (i / 2u)) * 16u + k] * right_of[k * 8u + 2u * T + i % 2u];
    barrier();
    return c;
}
uint shuffle(uint x, uint from) {
    swapped[LANE] = x;
    barrier();
    uint got = swapped[from];
    barrier();
    return got;
}
bool any_of(bool x) {
    uint some = 0u;
    for (uint i = 0u; i < 32u; ++i) some |= shuffle(uint(x), i);
    return some != 0u;
}
SUMS no_sums() { return SUMS(float[4](0.0, 0.0, 0.0, 0.0)); }
#else
#define UNROLL [[unroll]]
#define HALF float16_t
#define HALF2 f16vec2
HALF2 halves(uint bits) { return unpackFloat2x16(bits); }
uint half_words(HALF2 x) { return packFloat2x16(x); }
HALF2 rounded(vec2 x) { return f16vec2(x); }
#define LEFT coopmat<float16_t, gl_ScopeSubgroup, 16, 16, gl_MatrixUseA>
#define RIGHT coopmat<float16_t, gl_ScopeSubgroup, 16, 8, gl_MatrixUseB>
#define SUMS coopmat<float, gl_ScopeSubgroup, 16, 8, gl_MatrixUseAccumulator>
#define PART(m, i) m[i]
#define LANE gl_SubgroupInvocationID
#define SUBGROUP gl_SubgroupID
#define SUBGROUPS gl_NumSubgroups
#define multiply_add coopMatMulAdd
#define shuffle subgroupShuffle
#define any_of subgroupAny
#define no_sums() SUMS(0.0)
#endif
float shuffle_float(float x, uint from) { return uintBitsToFloat(shuffle(floatBitsToUint(x), from)); }
#endif
