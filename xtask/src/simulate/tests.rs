//! The keys of the JSON object, and what its figures must be

use std::sync::LazyLock;

use serde_json::Value;

use super::*;

/// The results for the published machine.
fn results() -> &'static Results {
    static RESULTS: LazyLock<Results> = LazyLock::new(|| {
        simulate(&Arguments { json: true, cpus: 96, units: 1, cpus_per_stream: 1 })
            .expect("the machine is allowed")
    });
    &RESULTS
}

fn number(value: &Value, key: &str) -> f64 {
    value[key].as_f64().unwrap_or_else(|| panic!("no number {key} in {value}"))
}

#[test]
fn the_json_object_has_the_promised_keys_and_the_published_figures() {
    let text = serde_json::to_string(results()).expect("it serializes");
    let printed: Value = serde_json::from_str(&text).expect("it parses");
    for prediction in [&printed, &printed["per_stream"]] {
        let rows = prediction["rows"].as_array().expect("rows are a list");
        assert_eq!(rows.len(), published::STREAMS.len());
        for (place, row) in rows.iter().enumerate() {
            assert_eq!(row["streams"], published::STREAMS[place]);
            assert_eq!(number(row, "published_base"), published::BASE[place]);
            assert_eq!(number(row, "published_batched"), published::BATCHED[place]);
            assert!(number(row, "base") < number(row, "batched"));
            assert!(number(row, "batched") < number(row, "planned_combined"));
            let cost = |key| number(&row["flush_us_per_page"], key);
            assert!(cost("base") > cost("batched"));
            assert!(cost("batched") > cost("planned_combined"));
        }
        for row in ["batched", "planned_combined"] {
            let fall = &prediction["fall"][row];
            assert!((0.0..=1.0).contains(&number(fall, "share")), "{fall}");
            assert!(number(fall, "share") <= number(fall, "bound"), "{fall}");
        }
    }
    assert_eq!(printed["rest"], "one server");
    assert_eq!(printed["per_stream"]["rest"], "one server per stream");
}

#[test]
fn what_flushing_may_cost_is_judged_for_one_and_two_cpus_of_a_stream_side_by_side() {
    let printed = serde_json::to_value(results()).expect("it serializes");
    let held = printed["held"].as_array().expect("a list");
    let ways = ["one server", "one server, who waits sleeps", "one server per stream"];
    let expected: Vec<_> = ways.iter().flat_map(|way| [(*way, 1), (*way, 2)]).collect();
    let found: Vec<_> = held
        .iter()
        .map(|row| (row["rest"].as_str().unwrap_or_default(), row["cpus_per_stream"].as_u64()))
        .map(|(rest, cpus)| (rest, cpus.unwrap_or_default()))
        .collect();
    assert_eq!(found, expected);
    for row in held {
        let holds = number(row, "flush_us_per_page") <= number(row, "aim");
        assert_eq!(row["holds"], holds, "{row}");
        let room = number(row, "further_cpu_us_at_most") >= number(row, "further_cpu_us");
        assert_eq!(room, holds, "{row}");
    }
    // The row of the tables above is the one with as many CPUs.
    let sixteen = &printed["rows"][4]["flush_us_per_page"];
    assert_eq!(number(&held[0], "flush_us_per_page"), number(sixteen, "planned_combined"));
}

#[test]
fn the_tables_name_both_stations_and_every_step() {
    let text = print::text(results());
    let steps = STEPS.iter().map(|(name, _)| *name);
    for word in ["one server.", "one server per stream.", "W7", "28 %"].into_iter().chain(steps) {
        assert!(text.contains(word), "{word} is missing from\n{text}");
    }
}
