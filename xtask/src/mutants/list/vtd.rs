//! Mutants of `crates/iommu_vtd`: units, their queues and their domains

use super::{VTD, inside};
use crate::mutants::Mutant;

pub(super) const MUTANTS: &[Mutant] = &[
    Mutant {
        name: "mask-too-small",
        file: "crates/iommu_vtd/src/command.rs",
        old: "Some(address) => address | hint | (block.order() & 0x3f) as u64,",
        new: "Some(address) => address | hint | (block.order().saturating_sub(1) & 0x3f) as u64,",
        invariant: 19,
        killer: inside(VTD, "command::tests::commands_encode_to_the_descriptors_of_the_manual"),
    },
    Mutant {
        name: "nothing-drained",
        file: "crates/iommu_vtd/src/command.rs",
        old: "Self { writes: capabilities.drains_writes(), reads: capabilities.drains_reads() }",
        new: "{ let _ = capabilities; Self { writes: false, reads: false } }",
        invariant: 60,
        killer: inside(
            VTD,
            "tests::attach::moving_a_device_goes_through_not_present_and_names_the_old_tag",
        ),
    },
    Mutant {
        name: "other-domain-flushed",
        file: "crates/iommu_vtd/src/flush.rs",
        old: "Command::IotlbPages { tag: own.tag, block, depth }",
        new: "Command::IotlbPages { tag: crate::Tag::new(own.tag.get() ^ 1), block, depth }",
        invariant: 17,
        killer: inside(
            VTD,
            "tests::flushes::a_member_that_is_gone_or_whose_unit_does_not_translate_gets_no_command_and_fails_the_flush",
        ),
    },
    Mutant {
        name: "device-tlbs-forgotten",
        file: "crates/iommu_vtd/src/flush.rs",
        old: "        self.push_devices(unit, &mut submitter, own, members, cover, error);\n        Some",
        new: "        let _ = (members, error);\n        Some",
        invariant: 2,
        killer: inside(
            VTD,
            "tests::flushes::a_devices_time_out_is_retried_wider_and_a_bounded_number_of_times",
        ),
    },
    Mutant {
        name: "gone-device-forgiven",
        file: "crates/iommu_vtd/src/flush.rs",
        old: "error.get_or_insert(DmaFlushError::Gone { unit: own.unit, source });",
        new: "let _ = source;",
        invariant: 32,
        killer: inside(
            VTD,
            "tests::flushes::a_devices_time_out_is_retried_wider_and_a_bounded_number_of_times",
        ),
    },
    Mutant {
        name: "unit-error-dropped",
        file: "crates/iommu_vtd/src/flush.rs",
        old: "if let Err(failed) = self.finish_unit(own, started) {",
        new: "if let (Err(failed), true) = (self.finish_unit(own, started), error.is_some()) {",
        invariant: 2,
        killer: inside(
            VTD,
            "tests::flushes::a_devices_time_out_is_retried_wider_and_a_bounded_number_of_times",
        ),
    },
    Mutant {
        name: "absence-not-flushed",
        file: "crates/iommu_vtd/src/flush.rs",
        old: "if only_leaves_added && !capabilities.caching_mode() {",
        new: "if only_leaves_added {",
        invariant: 6,
        killer: inside(
            VTD,
            "tests::flushes::added_entries_cost_nothing_unless_hardware_caches_absence_or_buffers_writes",
        ),
    },
    Mutant {
        name: "missing-table-kept",
        file: "crates/iommu_vtd/src/flush.rs",
        old: "match capabilities.caching_mode() && cover.order() > 0 {",
        new: "match capabilities.caching_mode() && cover.order() > 63 {",
        invariant: 6,
        killer: inside(
            VTD,
            "tests::flushes::added_entries_cost_nothing_unless_hardware_caches_absence_or_buffers_writes",
        ),
    },
    Mutant {
        name: "detach-leaves-iotlb",
        file: "crates/iommu_vtd/src/context.rs",
        old: "            submitter.push(Command::IotlbDomain { tag });\n            let extended",
        new: "            let extended",
        invariant: 17,
        killer: inside(
            VTD,
            "tests::attach::moving_a_device_goes_through_not_present_and_names_the_old_tag",
        ),
    },
    Mutant {
        name: "detach-leaves-entry",
        file: "crates/iommu_vtd/src/context.rs",
        old: "            memory.swap(table, index, 0);",
        new: "            let _ = (table, index);",
        invariant: 17,
        killer: inside(
            VTD,
            "tests::attach::moving_a_device_goes_through_not_present_and_names_the_old_tag",
        ),
    },
    Mutant {
        name: "context-halves-swapped",
        file: "crates/iommu_vtd/src/context.rs",
        old: "        memory.compare_exchange(table, index + 1, 0, high).map_err(|_| ContextError::Taken)?;\n        memory.swap(table, index, tables::context_low(root, translation));",
        new: "        memory.swap(table, index, tables::context_low(root, translation));\n        memory.compare_exchange(table, index + 1, 0, high).map_err(|_| ContextError::Taken)?;",
        invariant: 17,
        killer: inside(
            VTD,
            "tests::attach::moving_a_device_goes_through_not_present_and_names_the_old_tag",
        ),
    },
    Mutant {
        name: "status-word-reused",
        file: "crates/iommu_vtd/src/queue.rs",
        old: "Slot::Retired { data, .. } => port.status(index) == u64::from(data),",
        new: "Slot::Retired { .. } => true,",
        invariant: 15,
        killer: inside(
            VTD,
            "tests::queue::a_status_word_past_its_deadline_is_not_reused_and_its_late_write_satisfies_nobody",
        ),
    },
    Mutant {
        name: "any-status-satisfies",
        file: "crates/iommu_vtd/src/queue.rs",
        old: "if status != u64::from(data) {",
        new: "if status == 0 {",
        invariant: 16,
        killer: inside(
            VTD,
            "tests::queue::a_restart_ends_what_was_in_flight_and_no_late_write_of_it_satisfies_anybody",
        ),
    },
    Mutant {
        name: "ring-filled",
        file: "crates/iommu_vtd/src/queue.rs",
        old: "(port.memory.capacity() - 1).saturating_sub(",
        new: "port.memory.capacity().saturating_sub(",
        invariant: 15,
        killer: inside(VTD, "tests::queue::a_full_ring_is_told_from_an_empty_one_and_refuses_more"),
    },
    Mutant {
        name: "tag-zero-given",
        file: "crates/iommu_vtd/src/tags.rs",
        old: "for number in 1..self.limit {",
        new: "for number in 0..self.limit {",
        invariant: 18,
        killer: inside(
            VTD,
            "tests::attach::a_tag_serves_the_next_domain_only_after_its_last_device_left",
        ),
    },
    Mutant {
        name: "tag-back-too-early",
        file: "crates/iommu_vtd/src/domain.rs",
        old: "        unit.unbind(memory, &device, tag).map_err(DetachError::Command)?;\n        self.leave(unit, unit_index, source);",
        new: "        self.leave(unit, unit_index, source);\n        unit.unbind(memory, &device, tag).map_err(DetachError::Command)?;",
        invariant: 18,
        killer: inside(
            VTD,
            "tests::attach::a_detach_whose_flush_failed_keeps_member_and_tag_until_it_is_repeated",
        ),
    },
];
