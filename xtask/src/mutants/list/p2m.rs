//! Mutants of `crates/p2m`: a guest's map and its CPUs

use super::{P2M, inside};
use crate::mutants::Mutant;

pub(super) const MUTANTS: &[Mutant] = &[
    Mutant {
        name: "displaced-leaf-unrecorded",
        file: "crates/p2m/src/record.rs",
        old: "self.replaced = Some(self.skipped.leaf::<K>(run, order));",
        new: "self.replaced = Some(self.skipped.absent::<K>());",
        invariant: 6,
        killer: inside(
            P2M,
            "table::tests::a_page_that_changes_its_kind_is_on_record_and_not_given_away",
        ),
    },
    Mutant {
        name: "any-kind-cleared",
        file: "crates/p2m/src/table.rs",
        old: "leaf.mfn == mfn && leaf.tag == kind.tag()",
        new: "leaf.mfn == mfn",
        invariant: 11,
        killer: inside(
            P2M,
            "table::tests::only_the_expected_frame_and_kind_is_cleared_and_goes_on_record",
        ),
    },
    Mutant {
        name: "grant-gives-way",
        file: "crates/p2m/src/table.rs",
        old: "if !was.kind.is_some_and(PageKind::gives_way) {",
        new: "if was.kind.is_none() {",
        invariant: 11,
        killer: inside(
            P2M,
            "table::tests::only_own_memory_gives_way_and_what_it_showed_is_on_record",
        ),
    },
    Mutant {
        name: "cpus-not-marked",
        file: "crates/p2m/src/cpus.rs",
        old: "        self.marked.join_all(&all());\n        // Marks",
        new: "        // Marks",
        invariant: 13,
        killer: inside(
            P2M,
            "tlb::tests::a_cpu_that_enters_during_a_flush_invalidates_and_is_not_waited_for",
        ),
    },
    Mutant {
        name: "old-note-serves",
        file: "crates/p2m/src/cpus.rs",
        old: "left.load(Ordering::SeqCst) >= since.0",
        new: "left.load(Ordering::SeqCst) > 0",
        invariant: 14,
        killer: inside(P2M, "tlb::tests::an_old_acknowledgement_does_not_serve_a_new_flush"),
    },
    Mutant {
        name: "cpu-not-awaited",
        file: "crates/p2m/src/tlb.rs",
        old: "if self.guest.has_left(cpu, since) {",
        new: "if true {",
        invariant: 12,
        killer: inside(P2M, "tlb::tests::a_page_stays_held_until_the_last_cpu_left"),
    },
    Mutant {
        name: "own-cpu-forgotten",
        file: "crates/p2m/src/tlb.rs",
        old: "let served = if inside { guest.serve(this, self.local) } else { Ok(()) };",
        new: "let served = if inside && awaited.contains(this) { guest.serve(this, self.local) } else { Ok(()) };",
        invariant: 12,
        killer: inside(
            P2M,
            "tlb::tests::a_flushing_cpu_that_cannot_invalidate_fails_the_flush_after_all_were_waited_for",
        ),
    },
];
