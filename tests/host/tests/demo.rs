//! The main job's figures, on the model.

use host::demo::{Policy, Row, run};

#[test]
fn thirty_two_grants_cost_one_flush_of_each_kind_in_a_batch_and_thirty_two_without() {
    for policy in [Policy::PerPage, Policy::Batched, Policy::NoFlush] {
        eprintln!("{policy:?} {:?}", run(policy, 32));
    }
    let per_page = Row {
        tlb_flushes: 32,
        iotlb_flushes: 32,
        iotlb_commands: 32,
        waits: 32,
        pages_changed: 32,
        pages_flushed: 32,
        stale_accesses: 0,
        released_early: 0,
    };
    assert_eq!(run(Policy::PerPage, 32), per_page);
    let batched = Row { tlb_flushes: 1, iotlb_flushes: 1, iotlb_commands: 1, waits: 1, ..per_page };
    assert_eq!(run(Policy::Batched, 32), batched);
}
