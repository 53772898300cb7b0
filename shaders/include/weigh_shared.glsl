// Softmax by way of shared memory, whatever the order of a matrix's elements in the lanes: lanes share a row.
// Includer must include coopmat.glsl first and define LANES, the size of a subgroup.
#ifndef VKATTN_WEIGH_SHARED
#define VKATTN_WEIGH_SHARED

const uint STATES = 1u;                   // rows of an invocation
const uint ROW_LANES = LANES / EDGE;      // invocations to a row
const uint ROW_VECS = BLOCK_KEYS / 4u / ROW_LANES;
const uint WEIGHT_QUADS = BLOCK_KEYS / 8u * PARTS;
const uint MOST_QUADS = max(max(BLOCK_KEYS, EDGE) / 4u, WEIGHT_QUADS);
const uint S_PITCH = MOST_QUADS + 1u;
shared uvec4 scores[SUBGROUPS * EDGE * S_PITCH];  // of one matrix of rows of each subgroup; then the weights

struct Online {
    float row_max, row_sum;  // row_sum is that of the invocation's own keys only
};
Online no_keys() { return Online(LOWEST, 0.0); }

uint held_row() { return own_rows() + gl_SubgroupInvocationID / ROW_LANES; }

// Takes the dot products to shared memory, masks them, raises maxima and shrinks sums by it, and
// leaves the weights in shared memory.
void begin_tile(uint masking, ScoreRule rule, float scale_2, uint col0, SUMS s[KEY_TILES],
                inout SUMS acc[COL_TILES], inout Online online[STATES]) {
    uint mine = gl_SubgroupID * EDGE * S_PITCH, part = gl_SubgroupInvocationID % ROW_LANES;
    uint place = mine + gl_SubgroupInvocationID / ROW_LANES * S_PITCH;
    subgroupBarrier();
    [[unroll]] for (uint n = 0u; n < KEY_TILES; ++n)
        coopMatStore(s[n], scores, mine + n * EDGE / 4u, S_PITCH, gl_CooperativeMatrixLayoutRowMajor);
    subgroupBarrier();
    vec4 own[ROW_VECS];
    float old_max = online[0].row_max, new_max = LOWEST;
    [[unroll]] for (uint i = 0u; i < ROW_VECS; ++i)
        own[i] = uintBitsToFloat(scores[place + part + ROW_LANES * i]);
    if (masking != NOTHING) {
        ScoreRow row = score_rows[held_row()];
        [[unroll]] for (uint i = 0u; i < ROW_VECS; ++i)
            [[unroll]] for (uint c = 0u; c < 4u; ++c) {
                uint key = col0 + 4u * (part + ROW_LANES * i) + c;
                if (masking == BY_RULE) own[i][c] = score_2(own[i][c], rule, row, key);
                else if (key < row.begin || key >= row.end) own[i][c] = uintBitsToFloat(MINUS_INFINITY);
            }
    }
    [[unroll]] for (uint i = 0u; i < ROW_VECS; ++i)
        new_max = max(new_max, max(max(own[i].x, own[i].y), max(own[i].z, own[i].w)));
    [[unroll]] for (uint step = 1u; step < ROW_LANES; step *= 2u)
        new_max = max(new_max, subgroupShuffleXor(new_max, step));
    new_max = max(old_max, new_max * scale_2);
    float sum = 0.0, shift = HEADROOM - new_max, factor = exp2(old_max - new_max);
    [[unroll]] for (uint i = 0u; i < ROW_VECS; ++i) {
        own[i] = exp2(fma(own[i], vec4(scale_2), vec4(shift)));
        sum += (own[i].x + own[i].y) + (own[i].z + own[i].w);
    }
    online[0] = Online(new_max, fma(online[0].row_sum, factor, sum));
    subgroupBarrier();  // a matrix of factors, where the scores were
    for (uint i = part; i < EDGE / 4u; i += ROW_LANES) scores[place + i] = uvec4(floatBitsToUint(factor));
    subgroupBarrier();
    if (subgroupAny(factor != 1.0)) {
        SUMS factors;
        coopMatLoad(factors, scores, mine, S_PITCH, gl_CooperativeMatrixLayoutRowMajor);
        [[unroll]] for (uint d = 0u; d < COL_TILES; ++d) acc[d] *= factors;
    }
    subgroupBarrier();
    [[unroll]] for (uint i = 0u; i < ROW_VECS; ++i) {
        uint v = part + ROW_LANES * i;
        [[unroll]] for (uint low = 0u; low < PARTS; ++low) {
            uvec2 words = half_words(own[i]);
            if (v % 2u == 0u) scores[place + (low * BLOCK_KEYS / 4u + v) / 2u].xy = words;
            else scores[place + (low * BLOCK_KEYS / 4u + v) / 2u].zw = words;
#if defined(DTYPE_BF16)
            own[i] -= from_bf16(words);
#endif
        }
    }
    subgroupBarrier();
}

// The weights of GROUP matrices of keys from `first`, as operands.
void weigh(uint first, float scale_2, SUMS s[KEY_TILES], Online online[STATES], out QUERIES p[GROUP * PARTS]) {
    [[unroll]] for (uint n = 0u; n < GROUP; ++n)
        [[unroll]] for (uint low = 0u; low < PARTS; ++low)
            coopMatLoad(p[n * PARTS + low], scores,
                        gl_SubgroupID * EDGE * S_PITCH + low * BLOCK_KEYS / 8u + (first + n) * EDGE_QUADS, S_PITCH,
                        gl_CooperativeMatrixLayoutRowMajor);
}

// Which element a component is comes from a matrix that holds its own indices.
void add_not_finite(uint j, uint at, uint quads, inout SUMS acc[COL_TILES]) {
    uint mine = gl_SubgroupID * EDGE * S_PITCH;
    subgroupBarrier();
    for (uint i = gl_SubgroupInvocationID; i < EDGE * EDGE / 4u; i += LANES) {
        vec4 index = float(4u * i) + vec4(0.0, 1.0, 2.0, 3.0);
        scores[mine + i / (EDGE / 4u) * S_PITCH + i % (EDGE / 4u)] = floatBitsToUint(index);
    }
    subgroupBarrier();
    SUMS index;
    coopMatLoad(index, scores, mine, S_PITCH, gl_CooperativeMatrixLayoutRowMajor);
    for (uint i = 0u; i < index.length(); ++i) {
        uint place = uint(index[i]);
        [[unroll]] for (uint d = 0u; d < COL_TILES; ++d) {
            float term = not_finite_term(own_rows() + place / EDGE, d * EDGE + place % EDGE, j, at, quads);
            if (term != 0.0) acc[d][i] += term;
        }
    }
}

// Ends the subgroup's rows: lse, and what their sums are to be multiplied by in row_factor. May use `stage`.
void end_rows(RowTile tile, Online online[STATES]) {
    float sum = online[0].row_sum;
    [[unroll]] for (uint step = 1u; step < ROW_LANES; step *= 2u) sum += subgroupShuffleXor(sum, step);
    if (gl_SubgroupInvocationID % ROW_LANES == 0u)
        row_factor[held_row()] = finish_row(tile, tile.first + held_row(), natural_max(online[0].row_max), sum,
                                            (flags() & FLAG_LSE) != 0u);
}
#endif
