//! How lines of the program become rows, JSON and a table

use super::*;

const LINES: &str = "\
@ row format=arm64 granule=4K bits=48 chunk=1G layout=empty walks_before=262144 walks_after=512 \
flushes_unconditional=262144 flushes_conditional=0 entries_read=512 computed=false
@ row format=ept granule=4K bits=57 chunk=2M layout=empty walks_before=68719476736 \
walks_after=512 flushes_unconditional=68719476736 flushes_conditional=0 entries_read=512 \
computed=true
@ special name=destroy-16k-52 before=134217728 after=32 unit=walks
";

fn read() -> Results {
    results(&records::parse(LINES)).expect("lines as the program prints them")
}

#[test]
fn the_json_object_has_the_promised_keys() {
    let printed = serde_json::to_string(&read()).expect("results can be written");
    let first = "{\"rows\":[{\"format\":\"arm64\",\"granule\":\"4K\",\"bits\":48,\"chunk\":\"1G\",\
        \"layout\":\"empty\",\"walks_before\":262144,\"walks_after\":512,\
        \"flushes_unconditional\":262144,\"flushes_conditional\":0,\"entries_read\":512,\
        \"computed\":false},";
    assert!(printed.starts_with(first), "{printed}");
    let last = "\"specials\":[{\"name\":\"destroy-16k-52\",\"before\":134217728,\"after\":32,\
        \"unit\":\"walks\"}]}";
    assert!(printed.ends_with(last), "{printed}");
}

#[test]
fn the_table_marks_what_was_computed() {
    let printed = print::table(&read());
    let line = |name: &str| printed.lines().find(|line| line.contains(name)).map(str::to_owned);
    let measured = line("arm64 4K 48-bit").expect("a line of figures");
    assert!(measured.contains("262,144") && !measured.contains('~'), "{measured}");
    let computed = line("ept 4K 57-bit").expect("a line of figures");
    assert!(computed.contains("~68,719,476,736"), "{computed}");
    assert!(line("destroy-16k-52").is_some_and(|line| line.contains("134,217,728")));
}

#[test]
fn a_line_that_lacks_a_count_or_has_another_kind_is_an_error() {
    assert!(results(&records::parse("@ row format=arm64")).is_err());
    assert!(results(&records::parse("@ other name=x")).is_err());
}

#[test]
fn a_prefix_picks_cases_and_an_unknown_one_lists_them() {
    let list = records::parse("@ case name=arm64/4K/48/1G/empty\n@ special name=36-unmaps\n");
    let pick = |prefix| names(&list, prefix).map_err(|error| error.to_string());
    assert_eq!(pick(None).map(|names| names.len()), Ok(2));
    assert_eq!(pick(Some("arm64/4K")), Ok(vec!["arm64/4K/48/1G/empty".to_owned()]));
    let error = pick(Some("riscv")).expect_err("there is no such case");
    assert!(error.contains("36-unmaps"), "{error}");
}

#[test]
fn figures_are_grouped_by_thousands() {
    for (number, text) in [(0, "0"), (999, "999"), (1000, "1,000"), (134_217_728, "134,217,728")] {
        assert_eq!(print::grouped(number), text);
    }
}
