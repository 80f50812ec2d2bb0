//! The flush counters say what the hardware of the model saw.

use host::stats::{self, Row};

#[test]
fn the_counters_say_what_the_model_saw() {
    let rows = stats::all();
    let find = |name: &str| -> &Row { rows.iter().find(|row| row.name == name).expect("the row") };
    for row in &rows {
        assert!(row.agrees(), "{row:?}");
        let figures = &row.figures;
        for kind in [&figures.tlb, &figures.iotlb] {
            assert_eq!(kind.issued, kind.completed + kind.failed, "{}", row.name);
            assert_eq!(kind.asked, kind.avoided() + kind.completed, "{}", row.name);
            assert_eq!(kind.sizes.iter().sum::<u64>(), kind.completed, "{}", row.name);
        }
        if row.seen.is_some() {
            // Both kinds were asked for the same, and each batch came to a wait at least.
            assert_eq!(figures.tlb, figures.iotlb, "{}", row.name);
            assert!(figures.waits >= figures.iotlb.completed && figures.commands > 0);
            assert_eq!((figures.retries, figures.in_quarantine, figures.late_units), (0, 0, 0));
        }
    }
    let (alone, together) = (find("per page").figures, find("batched").figures);
    assert_eq!((alone.tlb.asked, alone.tlb.completed, alone.tlb.avoided()), (32, 32, 0));
    assert_eq!((together.tlb.asked, together.tlb.completed, together.tlb.avoided()), (32, 1, 31));
    assert_eq!((alone.commands, together.commands), (32, 1));
    assert_eq!((alone.kicks, together.kicks), (32, 1));
    assert_eq!((alone.over_flush(), together.over_flush()), (Some(1.0), Some(1.0)));
    assert_eq!((alone.tlb.sizes[0], together.tlb.sizes[5]), (32, 1));
    assert_eq!(together.tlb.recorded, 1, "one run");

    // One device's answer got lost; a queue hung through three retries of its batch.
    let failing = find("failing").figures;
    assert_eq!((failing.retried_commands, failing.retries), (1, 3));
    assert_eq!((failing.late_units, failing.in_quarantine), (4, 32));
    assert_eq!((failing.iotlb.failed, failing.iotlb.completed), (4, 1));
    assert_eq!((failing.tlb.issued, failing.tlb.failed), (2, 0));
    let at_once = find("at once").figures;
    assert_eq!(at_once.tickets, stats::CALLERS as u64);
    assert!(at_once.shared >= at_once.tickets - 2);
}
