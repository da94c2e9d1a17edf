//! Attention over paged K and V: who computes what.
//!
//! Queries that read the same K and V go together: the heads of a GQA group, and in prefill a few rows of one sequence,
//! up to [`QUERIES`] of them. Positions are walked in tiles of [`KV_TILE`] aligned to absolute positions, whose partial
//! results merge in order (`tile` has the arithmetic):
//!
//! ```text
//! item = (row block, kv head, part of the group)
//! many items: a thread takes a whole item, tile after tile, merging as it goes
//! few items:  a thread takes one tile of one item and keeps the partial result; the caller merges all at the end
//! ```
//!
//! Both ways merge the same partial results in the same order, so the choice is one of speed only. Threads take the
//! next piece from a counter, because rows differ in length.

pub(crate) mod codes;
mod floats;
mod tile;
pub(crate) mod weights;

use std::marker::PhantomData;
use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::kernels::Shared;
use crate::kv::{KvDtype, KvView};
use crate::math::LOG2_E;
use crate::simd::{BFloat16, Float16, Float32, dispatch};
use crate::{Isa, Kernels, Scratch};
use codes::{CodeTile, Int4, Int8, PackQuery, Queries};
use floats::FloatTile;
use tile::{Finish, HEADER, Merge, Place};

/// Positions of a tile: partial results exist per tile and merge in order.
pub const KV_TILE: usize = 256;

/// Queries of an item: what the registers hold accumulators for.
const QUERIES: usize = 12;

/// Items per thread from which whole items are shared out.
const ITEMS_PER_THREAD: usize = 4;

/// One query row: where its sequence's K and V lie, and which position it is.
#[derive(Clone, Copy, Debug)]
pub struct AttentionRow<'a> {
    /// Block id per ordinal. Entries wholly in front of the window are never read (`u32::MAX` by convention).
    pub table: &'a [u32],
    /// Position of this query; it sees positions up to and including its own.
    pub position: u32,
}

impl AttentionRow<'_> {
    /// Positions this row sees.
    fn visible(&self, window: Option<u32>) -> Range<usize> {
        let end = self.position as usize + 1;
        window.map_or(0, |w| end.saturating_sub(w as usize))..end
    }

    /// Whether `next` continues this row's sequence by one position.
    fn continued_by(&self, next: &AttentionRow<'_>) -> bool {
        std::ptr::eq(self.table, next.table) && self.position.checked_add(1) == Some(next.position)
    }
}

/// What is the same for all rows of a call.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AttentionParams {
    pub heads: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
    /// Distance in f32 between two rows of `q`.
    pub q_row_stride: usize,
    pub scale: f32,
    /// Sees positions `> position - window`. At least 1.
    pub window: Option<u32>,
    /// Scores become `cap * tanh(score / cap)`.
    pub soft_cap: Option<f32>,
}

impl AttentionParams {
    /// What dot products are multiplied by. Weights are powers of two, so scores are counted in units of ln 2; where a
    /// soft cap stands between, it sees to that.
    pub(crate) fn score_scale(&self) -> f32 {
        match self.soft_cap {
            Some(_) => self.scale,
            None => self.scale * LOG2_E,
        }
    }
}

impl Kernels {
    /// Attention of `rows.len()` query rows over their sequences.
    ///
    /// *Shapes*: `q: [rows, heads, head_dim]` with `params.q_row_stride`, `out: [rows, heads, head_dim]` dense. Query
    /// head `h` reads kv head `h / (heads / kv_heads)`. Rows of one sequence that follow each other with consecutive
    /// positions and the same `table` slice share the reading of K and V.
    ///
    /// *Panics* where shapes disagree with the view, or a table lacks a visible position or names a block the pool does
    /// not have.
    #[allow(clippy::too_many_arguments)]
    pub fn attention(
        &self,
        kv: &KvView,
        layer: usize,
        rows: &[AttentionRow<'_>],
        q: &[f32],
        out: &mut [f32],
        params: &AttentionParams,
        scratch: &mut Scratch,
    ) {
        let width = params.heads * params.head_dim;
        let shape = kv.shape();
        assert_eq!(
            (params.kv_heads, params.head_dim),
            (shape.kv_heads as usize, shape.head_dim as usize),
            "attention: kv heads and head dimensions of the pool"
        );
        assert!(
            params.heads.is_multiple_of(params.kv_heads),
            "attention: heads in whole groups"
        );
        assert!(params.window != Some(0), "attention: a window of nothing");
        assert_eq!(
            out.len(),
            rows.len() * width,
            "attention: out is [rows, heads, head_dim]"
        );
        if rows.is_empty() {
            return;
        }
        assert!(
            q.len() >= (rows.len() - 1) * params.q_row_stride + width,
            "attention: q is too short"
        );

        let group = params.heads / params.kv_heads;
        let parts = group.div_ceil(QUERIES);
        let part_heads = group.div_ceil(parts);
        let scratch = &mut scratch.attention;
        scratch.blocks.clear();
        let mut first = 0;
        for t in 1..=rows.len() {
            let full = t - first == (QUERIES / part_heads).max(1);
            if t == rows.len() || full || !rows[t - 1].continued_by(&rows[t]) {
                scratch.blocks.push((first, t - first));
                first = t;
            }
        }

        let record = HEADER + params.head_dim;
        let per_thread = QUERIES * (params.head_dim + KV_TILE + 2 * record)
            + weights::working_memory(params.head_dim);
        let work = Shared::new(scratch.floats.take(self.threads() * per_thread));
        let call = Call {
            isa: self.isa(),
            kv,
            layer,
            rows,
            q,
            params,
            blocks: &scratch.blocks,
            group,
            parts,
            part_heads,
            heads_inside: scratch.blocks.len() == rows.len(),
            record,
            out: Shared::new(out),
        };
        let workspace = |thread: usize| {
            // SAFETY: every thread has its own part, and uses it once per call.
            unsafe { work.slice(thread * per_thread..(thread + 1) * per_thread) }
        };

        let (items, threads) = (call.items(), self.threads());
        let next = AtomicUsize::new(0);
        if threads == 1 || items >= ITEMS_PER_THREAD * threads {
            // All heads of a sequence together, where that leaves enough to share out.
            let together = if call.heads_inside && call.blocks.len() >= ITEMS_PER_THREAD * threads {
                items / call.blocks.len()
            } else {
                1
            };
            self.pool().run(&|thread| {
                let (mut workspace, mut records) = call.workspace(workspace(thread));
                loop {
                    let unit = next.fetch_add(1, Ordering::Relaxed);
                    let first = unit * together;
                    if first >= items {
                        return;
                    }
                    for item in first..first + together {
                        let following = if item + 1 < first + together {
                            item + 1
                        } else {
                            (unit + threads) * together
                        };
                        let following = (following < items).then(|| call.item(following));
                        call.whole_item(
                            &call.item(item),
                            following.as_ref(),
                            &mut workspace,
                            &mut records,
                        );
                    }
                }
            });
            return;
        }
        scratch.units.clear();
        for item in 0..items {
            scratch
                .units
                .extend(call.item(item).tiles.map(|tile| (item, tile)));
        }
        let units = &scratch.units;
        let per_unit = QUERIES * record;
        let partials = scratch.partials.take(units.len() * per_unit);
        let shared = Shared::new(&mut *partials);
        self.pool().run(&|thread| {
            let (mut workspace, _) = call.workspace(workspace(thread));
            let mut packed = usize::MAX;
            loop {
                let unit = next.fetch_add(1, Ordering::Relaxed);
                let Some((item, tile)) = units.get(unit) else {
                    return;
                };
                let it = call.item(*item);
                if packed != *item {
                    call.pack_queries(&it, workspace.q);
                    packed = *item;
                }
                // SAFETY: units are handed out once, so their parts are disjoint.
                let records = unsafe { shared.slice(unit * per_unit..(unit + 1) * per_unit) };
                let following = units
                    .get(unit + threads)
                    .map(|(item, tile)| (call.item(*item), *tile));
                let ahead = following
                    .as_ref()
                    .map(|(item, tile)| call.place(item, *tile));
                call.tile(&it, *tile, &mut workspace, records, ahead);
            }
        });
        let mut unit = 0;
        for item in 0..items {
            let item = call.item(item);
            let tiles = item.tiles.clone();
            let (first, others) =
                partials[unit * per_unit..][..tiles.len() * per_unit].split_at_mut(per_unit);
            for (tile, records) in tiles.clone().skip(1).zip(others.chunks_exact(per_unit)) {
                call.merge(&item, tile, records, first);
            }
            call.finish(&item, first);
            unit += tiles.len();
        }
    }
}

/// One call of `attention`, shared by the threads.
struct Call<'a> {
    isa: Isa,
    kv: &'a KvView,
    layer: usize,
    rows: &'a [AttentionRow<'a>],
    q: &'a [f32],
    params: &'a AttentionParams,
    blocks: &'a [(usize, usize)],
    /// Query heads per kv head, and how they are cut.
    group: usize,
    parts: usize,
    part_heads: usize,
    /// Whether heads run fastest among items. In decode they do: K and V of all heads of a block lie side by side, so
    /// memory is read in longer runs. In prefill consecutive items read the same K and V, which stay in the cache.
    heads_inside: bool,
    /// f32 of one query's state: header and accumulator.
    record: usize,
    out: Shared<f32>,
}

/// Queries that read the same K and V.
struct Item<'a> {
    first_row: usize,
    rows: &'a [AttentionRow<'a>],
    kv_head: usize,
    first_head: usize,
    heads: usize,
    /// Tiles any of the rows sees.
    tiles: Range<usize>,
}

impl Item<'_> {
    fn queries(&self) -> usize {
        self.rows.len() * self.heads
    }
}

/// A thread's memory.
struct Workspace<'a> {
    /// `[head_dim][queries]`, or [`Queries`] where K and V are codes.
    q: &'a mut [f32],
    /// `[queries][KV_TILE]`
    scores: &'a mut [f32],
    /// [`weights::working_memory`]
    weights: &'a mut [f32],
}

/// `[queries]` records of the tile at hand, and of all tiles so far.
struct Records<'a> {
    tile: &'a mut [f32],
    total: &'a mut [f32],
}

impl<'a> Call<'a> {
    fn items(&self) -> usize {
        self.blocks.len() * self.params.kv_heads * self.parts
    }

    fn item(&self, index: usize) -> Item<'a> {
        let (blocks, heads) = (self.blocks.len(), self.params.kv_heads * self.parts);
        let (head, block) = if self.heads_inside {
            (index % heads, index / heads)
        } else {
            (index / blocks, index % blocks)
        };
        let (kv_head, part) = (head / self.parts, head % self.parts);
        let (first_row, count) = self.blocks[block];
        let rows = &self.rows[first_row..first_row + count];
        let first_head = part * self.part_heads;
        // Rows of a block ascend, so the first row's window starts first and the last row ends last.
        let start = rows[0].visible(self.params.window).start;
        let end = rows[count - 1].visible(self.params.window).end;
        Item {
            first_row,
            rows,
            kv_head,
            first_head: kv_head * self.group + first_head,
            heads: self.part_heads.min(self.group - first_head),
            tiles: start / KV_TILE..end.div_ceil(KV_TILE),
        }
    }

    fn workspace<'w>(&self, memory: &'w mut [f32]) -> (Workspace<'w>, Records<'w>) {
        let (q, memory) = memory.split_at_mut(QUERIES * self.params.head_dim);
        let (scores, memory) = memory.split_at_mut(QUERIES * KV_TILE);
        let codes = weights::working_memory(self.params.head_dim);
        let (weights, memory) = memory.split_at_mut(codes);
        let (tile, total) = memory.split_at_mut(QUERIES * self.record);
        (Workspace { q, scores, weights }, Records { tile, total })
    }

    fn whole_item(
        &self,
        item: &Item<'_>,
        following: Option<&Item<'_>>,
        workspace: &mut Workspace<'_>,
        records: &mut Records<'_>,
    ) {
        self.pack_queries(item, workspace.q);
        for tile in item.tiles.clone() {
            let ahead = if tile + 1 < item.tiles.end {
                Some(self.place(item, tile + 1))
            } else {
                following.map(|item| self.place(item, item.tiles.start))
            };
            if tile == item.tiles.start {
                self.tile(item, tile, workspace, records.total, ahead);
            } else {
                self.tile(item, tile, workspace, records.tile, ahead);
                self.merge(item, tile, records.tile, records.total);
            }
        }
        self.finish(item, records.total);
    }

    /// Lays the queries out for the tiles, query = row * heads + head.
    fn pack_queries(&self, item: &Item<'_>, to: &mut [f32]) {
        let dim = self.params.head_dim;
        let queries = item.queries();
        let codes = matches!(self.kv.shape().dtype, KvDtype::Int8 | KvDtype::Int4);
        for row in 0..item.rows.len() {
            for head in 0..item.heads {
                let at = (item.first_row + row) * self.params.q_row_stride
                    + (item.first_head + head) * dim;
                let (q, query) = (&self.q[at..at + dim], row * item.heads + head);
                if codes {
                    let pack = PackQuery {
                        memory: to,
                        queries,
                        query,
                        q,
                        score_scale: self.params.score_scale(),
                    };
                    // SAFETY: the instruction set was checked.
                    unsafe { dispatch(self.isa, pack) };
                    continue;
                }
                for (to, q) in to[query..].iter_mut().step_by(queries).zip(q) {
                    *to = *q;
                }
            }
        }
    }

    fn place<'b>(&'b self, item: &Item<'b>, tile: usize) -> Place<'b> {
        Place {
            kv: self.kv,
            layer: self.layer,
            kv_head: item.kv_head,
            rows: item.rows,
            heads: item.heads,
            params: self.params,
            tile,
        }
    }

    /// The partial results of one tile. `ahead` is what this thread probably computes next.
    fn tile(
        &self,
        item: &Item<'_>,
        tile: usize,
        workspace: &mut Workspace<'_>,
        records: &mut [f32],
        ahead: Option<Place<'_>>,
    ) {
        let place = self.place(item, tile);
        // Rows of a chunk read the same K and V again and again, so these are in the caches.
        let ahead = ahead.filter(|_| item.rows.len() == 1);
        macro_rules! floats {
            ($element:ty) => {{
                let kernel = FloatTile::<$element> {
                    place,
                    q: workspace.q,
                    scores: workspace.scores,
                    records,
                    ahead,
                    element: PhantomData,
                };
                // SAFETY: the instruction set was checked; the pool is readable where the rows see it, by the
                // contract of `KvView::new`.
                unsafe { dispatch(self.isa, kernel) }
            }};
        }
        macro_rules! codes {
            ($codes:ty) => {{
                let kernel = CodeTile::<$codes> {
                    place,
                    q: Queries {
                        memory: workspace.q,
                        queries: item.queries(),
                        head_dim: self.params.head_dim,
                    },
                    scores: workspace.scores,
                    weights: workspace.weights,
                    records,
                    ahead,
                    codes: PhantomData,
                };
                // SAFETY: as above.
                unsafe { dispatch(self.isa, kernel) }
            }};
        }
        match self.kv.shape().dtype {
            KvDtype::F32 => floats!(Float32),
            KvDtype::F16 => floats!(Float16),
            KvDtype::BF16 => floats!(BFloat16),
            KvDtype::Int8 => codes!(Int8),
            KvDtype::Int4 => codes!(Int4),
        }
    }

    /// Merges a tile that is not the item's first. Rows that end before it have nothing to add; those whose window starts
    /// in it take it over as it is.
    fn merge(&self, item: &Item<'_>, tile: usize, records: &[f32], total: &mut [f32]) {
        let per_row = self.record * item.heads;
        let visible = |row: &AttentionRow<'_>| row.visible(self.params.window);
        // Rows ascend, and so do their starts and ends.
        let first = item
            .rows
            .partition_point(|row| visible(row).end <= tile * KV_TILE);
        let merged = item
            .rows
            .partition_point(|row| visible(row).start < tile * KV_TILE);
        let count = item.rows.len();
        if first < merged {
            let rows = first * per_row..merged * per_row;
            let merge = Merge {
                tile: &records[rows.clone()],
                total: &mut total[rows],
                record: self.record,
            };
            // SAFETY: the instruction set was checked.
            unsafe { dispatch(self.isa, merge) };
        }
        let rows = merged.max(first) * per_row..count * per_row;
        total[rows.clone()].copy_from_slice(&records[rows]);
    }

    /// Writes `acc / l` of each query.
    fn finish(&self, item: &Item<'_>, total: &[f32]) {
        let dim = self.params.head_dim;
        for row in 0..item.rows.len() {
            let at = ((item.first_row + row) * self.params.heads + item.first_head) * dim;
            // SAFETY: these heads of this row belong to this item only.
            let out = unsafe { self.out.slice(at..at + item.heads * dim) };
            let finish = Finish {
                records: &total[row * item.heads * self.record..],
                record: self.record,
                out,
            };
            // SAFETY: the instruction set was checked.
            unsafe { dispatch(self.isa, finish) };
        }
    }
}
