// Matrices of a subgroup of 32, and which element of one a component of an invocation is, as on NVIDIA. No rule of
// Vulkan says so: the self-test of a kernel does. Invocation 4 g + t holds of
//   LEFT, 16 x 16   component i: row g + 8 (i / 4), column 8 (i / 2 % 2) + 2 t + i % 2
//   RIGHT, 16 x 8   component i: row 8 (i / 2) + 2 t + i % 2, column g
//   SUMS, 16 x 8    component i: row g + 8 (i / 2), column 2 t + i % 2
// With EMULATED the same is written out for any device, in float32 that is rounded to half: a workgroup of 32 is the
// subgroup. That is for tests, which find a wrong index without the units.
#ifndef VKATTN_LANE_MATRICES
#define VKATTN_LANE_MATRICES

#if defined(EMULATED)
#define UNROLL
#define LANE gl_LocalInvocationIndex
#define SUBGROUP 0u
#define SUBGROUPS 1u
#define HALF float
#define HALF2 vec2
#define PART(m, i) m.c[i]
struct LEFT { float c[8]; };
struct RIGHT { float c[4]; };
struct SUMS { float c[4]; };
shared float left_elements[256], right_elements[128];
shared uint lane_words[32];
#else
#define UNROLL [[unroll]]
#define LANE gl_SubgroupInvocationID
#define SUBGROUP gl_SubgroupID
#define SUBGROUPS (THREADS / 32u)
#define HALF float16_t
#define HALF2 f16vec2
#define PART(m, i) m[i]
#define LEFT coopmat<float16_t, gl_ScopeSubgroup, 16, 16, gl_MatrixUseA>
#define RIGHT coopmat<float16_t, gl_ScopeSubgroup, 16, 8, gl_MatrixUseB>
#define SUMS coopmat<float, gl_ScopeSubgroup, 16, 8, gl_MatrixUseAccumulator>
#endif

uint g() { return LANE / 4u; }
uint t() { return LANE % 4u; }

#define PUT(m, at, pair)            \
    {                               \
        HALF2 two = pair;           \
        PART(m, at) = two.x;        \
        PART(m, (at) + 1) = two.y;  \
    }

#if defined(EMULATED)
HALF2 halves(uint bits) { return unpackHalf2x16(bits); }
uint half_bits_of(HALF2 x) { return packHalf2x16(x); }
HALF2 rounded(vec2 x) { return unpackHalf2x16(packHalf2x16(x)); }
#define subgroupBarrier barrier
#define subgroupMemoryBarrierShared()
uint lower_halves(uint a, uint b) { return a & 0xFFFFu | b << 16; }
uint upper_halves(uint a, uint b) { return a >> 16 | b & 0xFFFF0000u; }
SUMS no_sums() { return SUMS(float[4](0.0, 0.0, 0.0, 0.0)); }

uint shuffle(uint x, uint from) {
    lane_words[LANE] = x;
    barrier();
    uint got = lane_words[from];
    barrier();
    return got;
}
bool any_of(bool x) {
    lane_words[LANE] = uint(x);
    barrier();
    uint some = 0u;
    for (uint i = 0u; i < 32u; ++i) some |= lane_words[i];
    barrier();
    return some != 0u;
}

SUMS multiply_add(LEFT a, RIGHT b, SUMS c) {
    for (uint i = 0u; i < 8u; ++i)
        left_elements[(g() + 8u * (i / 4u)) * 16u + 8u * (i / 2u % 2u) + 2u * t() + i % 2u] = a.c[i];
    for (uint i = 0u; i < 4u; ++i) right_elements[(8u * (i / 2u) + 2u * t() + i % 2u) * 8u + g()] = b.c[i];
    barrier();
    for (uint i = 0u; i < 4u; ++i)
        for (uint k = 0u; k < 16u; ++k)
            c.c[i] += left_elements[(g() + 8u * (i / 2u)) * 16u + k] * right_elements[k * 8u + 2u * t() + i % 2u];
    barrier();
    return c;
}
#else
HALF2 halves(uint bits) { return unpackFloat2x16(bits); }
uint half_bits_of(HALF2 x) { return packFloat2x16(x); }
HALF2 rounded(vec2 x) { return f16vec2(x); }
// The same bits as by masks and shifts, in one operation each, not two.
uint lower_halves(uint a, uint b) { return half_bits_of(HALF2(halves(a).x, halves(b).x)); }
uint upper_halves(uint a, uint b) { return half_bits_of(HALF2(halves(a).y, halves(b).y)); }
#define no_sums() SUMS(0.0)
#define shuffle subgroupShuffle
#define any_of subgroupAny
#define multiply_add coopMatMulAdd
#endif

float shuffle_float(float x, uint from) { return uintBitsToFloat(shuffle(floatBitsToUint(x), from)); }

// The leading 11 bits of numbers, which a half holds exactly. By hand, as a compiler may take the conversion to a half
// and back for nothing.
vec2 leading(vec2 x) { return uintBitsToFloat(floatBitsToUint(x) & 0xFFFFE000u); }
#endif
