//! Mutants of `crates/stage2`: tables and the walks over them

use super::{STAGE2, beside};
use crate::mutants::Mutant;

pub(super) const MUTANTS: &[Mutant] = &[
    Mutant {
        name: "clear-without-room",
        file: "crates/stage2/src/clear.rs",
        old: "Entry::Leaf(_) if self.record.leaves_left() == 0 => return",
        new: "Entry::Leaf(_) if !whole && self.record.leaves_left() == 0 => return",
        invariant: 8,
        killer: beside(
            STAGE2,
            "suite",
            "stops::a_walk_with_little_budget_and_room_ends_like_one_with_plenty",
        ),
    },
    Mutant {
        name: "cleared-leaf-unrecorded",
        file: "crates/stage2/src/clear.rs",
        old: "self.record.removed(place.span, order, leaf);",
        new: "let _ = order;",
        invariant: 6,
        killer: beside(
            STAGE2,
            "suite",
            "splits::clearing_part_of_a_leaf_records_all_of_it_and_keeps_the_other_part",
        ),
    },
    Mutant {
        name: "marks-lost-though-wanted",
        file: "crates/stage2/src/clear.rs",
        old: "words, self.record.marks());",
        new: "words, crate::memory::Marks::Unwanted);",
        invariant: 10,
        killer: beside(
            STAGE2,
            "suite",
            "stretches::marks_are_asked_for_where_somebody_may_look_at_them_and_nowhere_else",
        ),
    },
    Mutant {
        name: "unlink-without-room",
        file: "crates/stage2/src/clear.rs",
        old: "if self.record.tables_left() == 0 {",
        new: "if false {",
        invariant: 8,
        killer: beside(
            STAGE2,
            "suite",
            "stops::a_walk_with_little_budget_and_room_ends_like_one_with_plenty",
        ),
    },
    Mutant {
        name: "table-freed-at-once",
        file: "crates/stage2/src/clear.rs",
        old: "self.record.table(parent.span, memory.unlink(child)).map_err(|_leaked| Stop::Full)",
        new: "memory.discard(flush::FreshTable::new(child)); Ok(())",
        invariant: 1,
        killer: beside(
            STAGE2,
            "suite",
            "path::a_way_through_a_table_that_was_freed_is_not_used_again",
        ),
    },
    Mutant {
        name: "lowered-right-unrecorded",
        file: "crates/stage2/src/walk.rs",
        old: "self.record.changed(place.span, self.tables.recorded_order(place.level, &old), old);",
        new: "let _ = old;",
        invariant: 6,
        killer: beside(
            STAGE2,
            "suite",
            "flushes::changed_rights_ask_for_a_flush_and_unchanged_ones_do_not",
        ),
    },
    Mutant {
        name: "entries-read-for-nothing",
        file: "crates/stage2/src/walk.rs",
        old: "    if !budget.take() {\n        return halt(Stop::Budget, first, action, tally);",
        new: "    if budget.left() == 0 && !budget.take() {\n        return halt(Stop::Budget, first, action, tally);",
        invariant: 9,
        killer: beside(STAGE2, "suite", "counts::a_walk_reads_every_entry_of_every_table_once"),
    },
    Mutant {
        name: "split-unrecorded",
        file: "crates/stage2/src/split.rs",
        old: "record.changed(place.span, tables.recorded_order(place.level, &old), old);",
        new: "let _ = old;",
        invariant: 7,
        killer: beside(
            STAGE2,
            "suite",
            "splits::clearing_part_of_a_leaf_records_all_of_it_and_keeps_the_other_part",
        ),
    },
    Mutant {
        name: "origin-forgotten",
        file: "crates/stage2/src/split.rs",
        old: "let origin = leaf.origin.max(level);",
        new: "let origin = leaf.origin;",
        invariant: 33,
        killer: beside(
            STAGE2,
            "suite",
            "splits::clearing_part_of_a_leaf_records_all_of_it_and_keeps_the_other_part",
        ),
    },
    Mutant {
        name: "any-page-cleared",
        file: "crates/stage2/src/page.rs",
        old: "if expected(leaf) { Ok(0) }",
        new: "if expected(leaf) || raw != 0 { Ok(0) }",
        invariant: 11,
        killer: beside(
            STAGE2,
            "suite",
            "pages::a_page_that_turns_into_something_else_meanwhile_is_not_cleared",
        ),
    },
    Mutant {
        name: "page-of-a-split-small",
        file: "crates/stage2/src/page.rs",
        old: "let order = tables.recorded_order(Level::PAGE, &leaf);",
        new: "let order = 0;",
        invariant: 33,
        killer: beside(
            STAGE2,
            "suite",
            "splits::a_part_goes_on_record_at_the_size_of_the_leaf_it_came_from",
        ),
    },
    Mutant {
        name: "root-freed-in-use",
        file: "crates/stage2/src/destroy.rs",
        old: "if !tables.root_is_empty() {",
        new: "if false {",
        invariant: 1,
        killer: beside(STAGE2, "suite", "chunks::the_loop_takes_a_tree_down_and_its_root_last"),
    },
    Mutant {
        name: "new-leaf-unrecorded",
        file: "crates/stage2/src/map.rs",
        old: "            record.added(span);\n            Ok(None)",
        new: "            Ok(None)",
        invariant: 6,
        killer: beside(STAGE2, "suite", "maps::a_first_leaf_is_added_and_its_tables_are_linked"),
    },
];
