// What the kernels on matrix units share: push constants, buffers, the stage in shared memory, which tiles of keys are
// open, scores in base 2, and values that are not finite. Operands are float16 or bfloat16 (DTYPE_F16, DTYPE_BF16), in
// queries, keys, values and outputs alike.
// Includer must define WIDTH (head_dim and value_dim, padded), EDGE (of the matrices, and the query rows of a
// subgroup), SUBGROUPS, BLOCK_ROWS (of all of them), BLOCK_KEYS (keys of a tile) and THREADS.
#ifndef VKATTN_COOPMAT
#define VKATTN_COOPMAT

#include "prefill_push.glsl"

#if defined(DTYPE_F16)
#define ELEMENT float16_t
#define EXPONENTS 0x7C007C00u
#define EXPONENT_STEPS 0x04000400u
uvec2 half_words(vec4 x) { return uvec2(packFloat2x16(f16vec2(x.xy)), packFloat2x16(f16vec2(x.zw))); }
#elif defined(DTYPE_BF16)
#include "elements.glsl"
#define ELEMENT bfloat16_t
#define EXPONENTS 0x7F807F80u
#define EXPONENT_STEPS 0x00800080u
#define half_words to_bf16
#endif

#include "params.glsl"
layout(set = 0, binding = 1) restrict readonly buffer Query { uvec4 query[]; };
layout(set = 0, binding = 2) restrict readonly buffer Key { uvec4 key[]; };
layout(set = 0, binding = 3) restrict readonly buffer Value { uvec4 value[]; };
layout(set = 0, binding = 4) restrict readonly buffer Mask { uint mask_data[]; };
layout(set = 0, binding = 5) coherent writeonly buffer Out { uvec2 outputs[]; };
layout(set = 0, binding = 6) coherent writeonly buffer Lse { float lse[]; };
#include "tiles.glsl"
#include "score.glsl"
#include "prefill.glsl"

const float LOG2_E = 1.44269504, LN_2 = 0.693147181;
// The maximum has weight 2^HEADROOM, not 1: in float16 weights down to 2^-36 of the largest then keep some bits.
const float HEADROOM = 12.0;
// The maximum that weights are relative to rises only where a score is beyond it by more than SLACK, so that sums are
// shrunk rarely. 2^(HEADROOM + SLACK) is a float16 still.
const float SLACK = 3.0;

const uint ROW_QUADS = WIDTH / 8u;
const uint PITCH = ROW_QUADS + 1u;  // a quad of padding keeps rows off each other's banks
const uint TILE_QUADS = BLOCK_KEYS * ROW_QUADS;               // quads of a tile of keys
const uint FETCHES = (TILE_QUADS + THREADS - 1u) / THREADS;  // and of an invocation
const uint COL_TILES = WIDTH / EDGE;       // matrices across head_dim and value_dim
const uint KEY_TILES = BLOCK_KEYS / EDGE;  // and across a tile of keys
const uint GROUP = KEY_TILES % 2u == 0u ? 2u : 1u;  // of those, that are weighed and multiplied before the next
const uint EDGE_QUADS = EDGE / 8u;
const uint STAGE = BLOCK_KEYS * PITCH;     // quads of a staged tile
const uint DIRTY_WORDS = (BLOCK_KEYS + 31u) / 32u;
const uint QUERY_SUBGROUPS = min(SUBGROUPS, max(2u * BLOCK_KEYS / EDGE, 4u));  // whose queries are staged at once
const uint OUT_PITCH = EDGE / 4u + 1u;     // of a staged matrix of float32

// A tile of keys, then one of values. Before them, the queries; after them, the outputs.
shared uvec4 stage[max(max(2u * STAGE, QUERY_SUBGROUPS * EDGE * PITCH), 2u * SUBGROUPS * EDGE * OUT_PITCH)];
shared ScoreRow score_rows[BLOCK_ROWS];
shared float row_factor[BLOCK_ROWS];
shared uint open_stamp[2];  // the tile that the mask leaves open to somebody; two, so that one barrier will do
shared uint soiled_turn;    // with weights in two parts: when the last tile is weighed whose values are not all finite
shared uint dirty_keys[2u * DIRTY_WORDS];  // of two tiles in turn: keys whose values are not all finite, a bit each

// What hides scores of a tile: nothing; where a row lies, causal or in a window; or that and all of the rule.
const uint NOTHING = 0u, BY_PLACE = 1u, BY_RULE = 2u;

#define QUERIES coopmat<ELEMENT, gl_ScopeSubgroup, EDGE, EDGE, gl_MatrixUseA>
#define KEYS coopmat<ELEMENT, gl_ScopeSubgroup, EDGE, EDGE, gl_MatrixUseB>
#define SUMS coopmat<float, gl_ScopeSubgroup, EDGE, EDGE, gl_MatrixUseAccumulator>

// The first row of this subgroup in the tile.
uint own_rows() { return gl_SubgroupID * EDGE ; }

// Not 0 if the quad holds an infinity or a NaN: only then does adding 1 to an exponent's last bit carry out of it.
uint not_finite(uvec4 quad) {
    uvec4 carry = ((quad & EXPONENTS) + EXPONENT_STEPS) & 0x80008000u;
    return carry.x | carry.y | carry.z | carry.w;
}

// The quad with 0 for each element that is not finite.
uvec4 only_finite(uvec4 quad) {
    uvec4 carry = ((quad & EXPONENTS) + EXPONENT_STEPS) & 0x80008000u;
    return quad & ~((carry >> 15) * 0xFFFFu);
}

// Element e of a quad.
float quad_element(uvec4 quad, uint e) {
    uint bits = quad[e >> 1u] >> (16u * (e & 1u)) & 0xFFFFu;
#if defined(DTYPE_F16)
    return unpackHalf2x16(bits).x;
#else
    return uintBitsToFloat(bits << 16);
#endif
}

// Whether the mask leaves anything of the tile [col0, col0 + BLOCK_KEYS) open; the same answer in the whole workgroup.
bool tile_open(ScoreRule rule, uint col0, uint stamp) {
    bool open = false;
    for (uint i = gl_LocalInvocationIndex; i < BLOCK_ROWS * BLOCK_KEYS && !open; i += THREADS)
        open = attended(rule, score_rows[i / BLOCK_KEYS], col0 + i % BLOCK_KEYS);
    if (open) open_stamp[stamp & 1u] = stamp;
    barrier();
    return open_stamp[stamp & 1u] == stamp;
}

// The first tile at or after col0 that is not closed by the mask, or some place at or after `end`.
uint next_open(ScoreRule rule, uint col0, uint end, inout uint stamp) {
    if (rule.mask_kind == 0u) return col0;
    while (col0 < end && !tile_open(rule, col0, ++stamp)) col0 += BLOCK_KEYS;
    return col0;
}

// A masked score in base 2 from a dot product. What is finite stays finite: the lowest float in a mask closes nothing.
float score_2(float dot_product, ScoreRule rule, ScoreRow row, uint key) {
    float s = masked_score(dot_product, rule, row, key);
    return isinf(s) || isnan(s) ? s : clamp(s * LOG2_E, LOWEST, -LOWEST);
}

// The maximum of a row's scores, as finish_row takes it. HEADROOM is lost in the lowest float.
float natural_max(float row_max) { return row_max == LOWEST ? LOWEST : (row_max - HEADROOM) * LN_2; }

// What is to be added to the sum of a row of the tile and an element of value_dim for key j, whose values are not all
// finite and lie at `at`: its value, if that is not finite and the row attends it; else 0.
float not_finite_term(uint row, uint element, uint j, uint at, uint quads) {
    if (element / 8u >= quads || !attended(score_rule(), score_rows[row], j)) return 0.0;
    float v = quad_element(value[at + element / 8u], element % 8u);
    return isnan(v) || isinf(v) ? v : 0.0;
}

// Weights as operands: in bfloat16 one matrix for the leading bits and one for the rest, as 8 bits are too few.
#if defined(DTYPE_BF16)
const uint PARTS = 2u;
#else
const uint PARTS = 1u;
#endif
#endif
