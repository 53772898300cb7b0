// Which rows and columns of a tile an invocation of attn_fused computes.
// Includer must define TILE_SMALL or not, BLOCK_ROWS, SCORE_ROWS and OUT_ROWS.
#ifndef VKATTN_FUSED_PLACES
#define VKATTN_FUSED_PLACES

#if defined(TILE_SMALL)
// Row i of the invocation at height y is LEAP y + STEP i: its rows lie together, so that few live rows leave others
// idle, which is what a software device saves by.
const uint SCORE_LEAP = SCORE_ROWS, SCORE_STEP = 1u, OUT_LEAP = OUT_ROWS, OUT_STEP = 1u;
const bool MAY_IDLE = true;

uvec2 place_of(uint lane, uint wide) { return uvec2(lane % wide, lane / wide); }
#else
// Here neighbours have neighbouring rows, which lie on different banks of shared memory.
const uint SCORE_LEAP = 1u, SCORE_STEP = BLOCK_ROWS / SCORE_ROWS, OUT_LEAP = 1u, OUT_STEP = BLOCK_ROWS / OUT_ROWS;
const bool MAY_IDLE = false;

// 32 invocations (a subgroup, on most devices) take 8 across and 4 down: of lanes that differ in bit 0 only, and of
// those that differ in bit 1 only, two read the same vec, which NVIDIA's shared memory then delivers at half the cost.
uvec2 place_of(uint lane, uint wide) {
    uint across = wide / 8u, group = lane / 32u;
    return uvec2((lane & 14u) >> 1, lane >> 3 & 2u | lane & 1u) + uvec2(group % across * 8u, group / across * 4u);
}
#endif
#endif
