//! A teardown costs what is mapped, whatever the width of the space.

use host::teardown::{Cost, Teardown};

#[track_caller]
fn cost(name: &str) -> Cost {
    let line = Teardown::named(name).unwrap_or_else(|| panic!("no line is called {name}"));
    let mut standing = line.prepare().unwrap();
    let cost = standing.take_down().unwrap();
    standing.settle().unwrap();
    assert_eq!(cost, line.expected(), "{name}");
    cost
}

#[test]
fn a_teardown_reads_each_table_once_and_frees_it() {
    for line in Teardown::all() {
        let cost = cost(&line.name());
        assert_eq!(cost.entries_read, 512 * cost.tables_freed, "{}", line.name());
        assert_eq!(cost.leaves, line.mappings, "{}", line.name());
    }
}

#[test]
fn its_cost_grows_in_a_straight_line_with_the_mappings() {
    for mappings in [1, 16, 256, 4096, 65_536, 1 << 20] {
        let read = cost(&format!("48/together/{mappings}")).entries_read;
        // The tables on the way down, and one more entry for each 512 mappings.
        assert!(read <= 4 * 512 + mappings + mappings / 256, "{mappings}: {read}");
    }
    for mappings in [16, 256, 4096, 16_384] {
        let tables = cost(&format!("48/apart/{mappings}")).tables_freed;
        assert!(tables <= 3 + mappings + mappings / 256, "{mappings}: {tables}");
    }
}

#[test]
fn each_level_more_costs_one_table_more_and_nothing_else() {
    for mapped in ["together/1", "together/65536", "apart/256"] {
        let of = |bits: u8| cost(&format!("{bits}/{mapped}"));
        let narrow = of(39);
        for (bits, more) in [(48, 1), (57, 2)] {
            let expected = Cost {
                entries_read: narrow.entries_read + 512 * more,
                tables_freed: narrow.tables_freed + more,
                leaves: narrow.leaves,
            };
            assert_eq!(of(bits), expected, "{bits} bits, {mapped}");
        }
    }
}
