//! Mutants of `crates/flush`: records, batches and blocks

use super::{FLUSH, HOST, beside, inside};
use crate::mutants::Mutant;

pub(super) const MUTANTS: &[Mutant] = &[
    Mutant {
        name: "devices-not-waited",
        file: "crates/flush/src/batch.rs",
        old: "iotlb: on_units.and_then(|token| units.wait(token).err()),",
        new: "iotlb: on_units.and_then(|_| None),",
        invariant: 2,
        killer: inside(FLUSH, "batch::tests::without_an_iommu_a_device_record_fails_the_flush"),
    },
    Mutant {
        name: "cpus-not-waited",
        file: "crates/flush/src/batch.rs",
        old: "tlb: on_cpus.and_then(|token| cpus.wait(token).err()),",
        new: "tlb: on_cpus.and_then(|_| None),",
        invariant: 2,
        killer: inside(
            FLUSH,
            "combine::tests::many_threads_that_flush_at_once_release_nothing_stale",
        ),
    },
    Mutant {
        name: "failed-kind-paid",
        file: "crates/flush/src/both.rs",
        old: "        if tlb {\n            self.tlb.clear();",
        new: "        if tlb || iotlb {\n            self.tlb.clear();",
        invariant: 2,
        killer: inside(
            FLUSH,
            "both::tests::a_kind_that_was_paid_owes_nothing_and_the_other_still_owes_its_own",
        ),
    },
    Mutant {
        name: "devices-asked-for-cpus",
        file: "crates/flush/src/batch.rs",
        old: "(!iotlb.is_nothing()).then(",
        new: "(!tlb.is_nothing()).then(",
        invariant: 2,
        killer: inside(
            FLUSH,
            "batch::tests::a_failed_flush_holds_every_page_until_each_owed_kind_completed",
        ),
    },
    Mutant {
        name: "full-batch-edits",
        file: "crates/flush/src/batch.rs",
        old: "if self.0.pages.is_full() {",
        new: "if false {",
        invariant: 8,
        killer: inside(FLUSH, "batch::tests::a_full_batch_refuses_before_the_edit_runs"),
    },
    Mutant {
        name: "leak-not-counted",
        file: "crates/flush/src/batch.rs",
        old: "if lost > 0 {",
        new: "if lost > N {",
        invariant: 4,
        killer: inside(
            FLUSH,
            "batch::tests::a_dropped_batch_leaks_its_pages_and_neither_flushes_nor_drops_them",
        ),
    },
    Mutant {
        name: "owed-flush-not-counted",
        file: "crates/flush/src/batch.rs",
        old: "        if !self.is_paid() {\n            UNFLUSHED",
        new: "        if false {\n            UNFLUSHED",
        invariant: 34,
        killer: inside(
            FLUSH,
            "batch::tests::a_batch_dropped_with_a_flush_owed_is_noticed_though_it_holds_nothing",
        ),
    },
    Mutant {
        name: "depth-forgotten",
        file: "crates/flush/src/cover.rs",
        old: "        self.depth = self.depth.max(depth);\n        self.change = self.change.max(change);",
        new: "        self.change = self.change.max(change);",
        invariant: 5,
        killer: inside(
            FLUSH,
            "cover::tests::depth_change_and_order_only_widen_and_everything_absorbs",
        ),
    },
    Mutant {
        name: "touched-run-forgotten",
        file: "crates/flush/src/cover.rs",
        old: "melted.iter().fold(run, |hull, own| hull.hull(*own));",
        new: "melted.iter().fold(run, |hull, _| hull);",
        invariant: 5,
        killer: inside(FLUSH, "cover::tests::a_cover_never_forgets_a_frame"),
    },
    Mutant {
        name: "noted-run-out-of-order",
        file: "crates/flush/src/cover.rs",
        old: "Some(last) => last.last() < run.first(),",
        new: "Some(_) => true,",
        invariant: 69,
        killer: inside(
            FLUSH,
            "cover::tests::what_is_noted_ends_like_what_is_recorded_wherever_it_is_settled",
        ),
    },
    Mutant {
        name: "full-record-forgets",
        file: "crates/flush/src/cover.rs",
        old: "self.widen(start, run, order);",
        new: "",
        invariant: 5,
        killer: inside(FLUSH, "cover::tests::a_cover_never_forgets_a_frame"),
    },
    Mutant {
        name: "leaf-size-forgotten",
        file: "crates/flush/src/cover.rs",
        old: "order = order.max(self.orders[end]);",
        new: "",
        invariant: 33,
        killer: inside(
            FLUSH,
            "cover::tests::a_page_beside_a_large_leaf_keeps_its_own_size_and_a_page_inside_is_part_of_it",
        ),
    },
    Mutant {
        name: "merge-forgets-everything",
        file: "crates/flush/src/cover.rs",
        old: "if *everything {",
        new: "if false && *everything {",
        invariant: 5,
        killer: inside(
            FLUSH,
            "cover::tests::depth_change_and_order_only_widen_and_everything_absorbs",
        ),
    },
    Mutant {
        name: "block-rounds-length",
        file: "crates/flush/src/block.rs",
        old: "(first ^ last).leading_zeros()",
        new: "(last - first).leading_zeros()",
        invariant: 19,
        killer: inside(FLUSH, "block::tests::every_small_run_gets_its_smallest_aligned_block"),
    },
    Mutant {
        name: "block-not-aligned",
        file: "crates/flush/src/block.rs",
        old: "Some(mask) => Self { base: self.base & mask, order },",
        new: "Some(_) => Self { base: self.base, order },",
        invariant: 19,
        killer: inside(FLUSH, "block::tests::every_small_run_gets_its_smallest_aligned_block"),
    },
    Mutant {
        name: "new-table-hinted",
        file: "crates/flush/src/skipped.rs",
        old: "self.record.add::<K>(run, 0, Depth::Tables, Change::Added);",
        new: "self.record.add::<K>(run, 0, Depth::Leaves, Change::Added);",
        invariant: 6,
        killer: beside(
            HOST,
            "regressions",
            "a_page_in_a_new_table_is_reached_although_the_old_table_was_not_flushed_yet",
        ),
    },
    Mutant {
        name: "new-large-leaf-small",
        file: "crates/flush/src/skipped.rs",
        old: "block.order() >= LARGE &&",
        new: "block.order() > 63 &&",
        invariant: 6,
        killer: beside(
            HOST,
            "regressions",
            "a_large_page_is_reached_although_the_lack_of_a_table_was_cached",
        ),
    },
];
