//! A file that makes no sense is refused, with its line and what was expected.

use std::path::Path;

use scenarios::parse;

const HEAD: &str = "title = \"a title\"\nbound = { tlb = 1, iotlb = 1 }\n";

/// The problem with `HEAD` and what follows it: line, and what is said.
#[track_caller]
fn refused(text: &str, line: usize, says: &[&str]) {
    let text = format!("{HEAD}{text}");
    let problem = parse::parse(Path::new("some.toml"), &text).expect_err(&text);
    let shown = problem.to_string();
    assert_eq!(problem.place.map(|(line, _)| line), Some(line), "{shown}\n{text}");
    assert!(shown.starts_with(&format!("some.toml:{line}:")), "{shown}");
    for word in says {
        assert!(shown.contains(word), "`{word}` is not in `{shown}`");
    }
}

#[track_caller]
fn step(text: &str, says: &[&str]) {
    refused(&format!("[[step]]\n{text}\n"), 3, says);
}

#[test]
fn a_file_without_a_bound_on_flushes_is_refused() {
    let problem = parse::parse(Path::new("some.toml"), "title = \"a title\"\n");
    let shown = problem.expect_err("it has no bound").to_string();
    assert!(shown.contains("missing field `bound`"), "{shown}");
    let problem = parse::parse(Path::new("some.toml"), "title = \"t\"\nbound = { tlb = 1 }\n");
    let shown = problem.expect_err("half of the bound is missing").to_string();
    assert!(shown.contains("missing field `iotlb`"), "{shown}");
}

#[test]
fn unknown_keys_are_refused_with_those_there_are() {
    refused("[machine]\nframe = 12\n", 4, &["unknown field `frame`", "`frames`"]);
    refused("[unit]\npsi = true\n", 4, &["unknown field `psi`", "page_selective"]);
    refused("[[step]]\nmpa = {}\n", 4, &["unknown field `mpa`", "`map`", "`unmap`"]);
    refused("[[step]]\nunmap = { mapping = \"a\" }\n", 4, &["unknown field `mapping`", "mappings"]);
    refused("[[step]]\nfail = { operation = 1, how = \"die\" }\n", 4, &["`die`", "queue-error"]);
}

#[test]
fn a_step_does_exactly_one_thing() {
    step("note = \"nothing\"", &["does nothing", "expected one of", "map, unmap"]);
    step("mark = {}\nrepair = {}", &["more than one thing", "`repair` and `mark`"]);
}

#[test]
fn names_have_to_be_known() {
    step("take_back = { pages = \"a\" }", &["no page `a`", "none so far"]);
    step("unmap = { mappings = \"m\" }", &["no mapping `m`"]);
    step("enter = { cpu = 1, domain = \"middle\" }", &["no domain `middle`", "back, front"]);
    step("detach = { device = \"dev1\" }", &["no device `dev1`", "dev0"]);
    step("access = { by = \"cpu9\", at = 1, reaches = \"fault\" }", &["no cpu 9", "1 to 3"]);
    step("workload = { name = \"W9\", steps = 1 }", &["`W9`", "W1 to W8"]);
}

#[test]
fn lists_have_to_fit() {
    let grant = "[[step]]\ngrant = { pages = \"a[0..3]\" }\n[[step]]\n";
    let map = |rest: &str| format!("{grant}map = {{ pages = \"a[0..3]\", at = 1, {rest} }}\n");
    refused(&map("status = [0, 0]"), 5, &["`status` has 2 values for 3 elements"]);
    let swap = format!("{grant}swap = {{ pages = [\"a0\", \"a1\"], with = \"a2\" }}\n");
    refused(&swap, 5, &["with has 1 names", "expected 2"]);
    refused(&map("as = \"b\""), 5, &["`as` has 1 names", "expected 3"]);
    refused(&map("alter = [{ element = 3 }]"), 5, &["element 3", "expected 0 to 2"]);
    let two = "[[step]]\ngrant = { pages = [\"a0\", \"a1\"] }\n[[step]]\n\
               map = { pages = [\"a0\", \"a1\"], at = 1 }\n[[step]]\n";
    for action in [
        "copy = { pages = \"a0\", at = 9, status = [0, 0] }",
        "swap = { pages = \"a0\", with = \"a1\", status = [0, 0] }",
        "unmap = { mappings = \"a0\", status = [0, 0] }",
    ] {
        refused(&format!("{two}{action}\n"), 7, &["`status` has 2 values for 1 elements"]);
    }
    let unmap = format!("{two}unmap = {{ mappings = \"a0\", alter = [{{ element = 1 }}] }}\n");
    refused(&unmap, 7, &["element 1", "expected 0 to 0"]);
    let check = format!("{two}check = {{ counted = \"a0\" }}\n");
    refused(&check, 7, &["`references` and `counted` go together"]);
}

#[test]
fn numbers_have_their_range() {
    step("word = { sort = 'status', word = 9, low = 65536 }", &["16 bits", "up to 65535"]);
    step("word = { sort = 'status', word = 9, low = 1, high = 1 }", &["16 bits"]);
    for (table, key, wrong, expected) in [
        ("machine", "levels", [2, 6], "3 to 5"),
        ("machine", "frames", [511, 65_537], "512 to 65536"),
        ("machine", "handle_pages", [0, 1025], "1 to 1024"),
        ("unit", "count", [0, 5], "1 to 4"),
        ("unit", "max_address_mask", [64, 255], "0 to 63"),
        ("unit", "domain_id_bits", [3, 17], "4 to 16"),
        ("unit", "address_bits", [29, 58], "30 to 57"),
        ("unit", "latency", [0, 101], "1 to 100"),
        ("unit", "fault_records", [0, 257], "1 to 256"),
        ("unit", "ring", [8, 255], "0 to 7"),
    ] {
        for value in wrong {
            let says = [&*format!("{table}.{key} is {value};"), expected];
            refused(&format!("[{table}]\n{key} = {value}\n"), 2, &says);
        }
    }
    refused("[unit]\nlatency = -1\n", 4, &["invalid value", "u32"]);
    step("populate = { pages = \"p\", at = 0, order = 3 }", &["order is 3", "0 or 9"]);
    step("populate = { pages = \"p\", at = 7, order = 9 }", &["at is 0x7", "multiple of 512"]);
    step("clear = { first = 0, count = 0 }", &["count is 0", "1 or more"]);
    step("restrict = { first = 0, count = 0, allow = 'read' }", &["count is 0", "1 or more"]);
    refused(
        "[[step]]\nunmap = { mappings = [], tlb = { min = 3, max = 1 } }\n",
        4,
        &["min is more"],
    );
}

#[test]
fn machines_that_cannot_be_are_refused() {
    let tables = "machine = { cpus = \"npt\", tables = \"shared\" }\n";
    refused(tables, 2, &["VT-d cannot walk NPT", "`separate` or `both`"]);
    let marked = "machine = { cpus = \"npt\", accessed = true }\n";
    refused(marked, 2, &["flags of EPT", "`ept` or absent"]);
    let marked = "machine = { tables = \"shared\", accessed = true }\n";
    refused(marked, 2, &["which devices do not", "`separate` or `both`"]);
    refused("machine = { asids = 4 }\n", 2, &["machine.asids", "to be `npt`"]);
    refused("machine = { flush_by_asid = false }\n", 2, &["flush_by_asid", "to be `npt`"]);
    refused("machine = { cpus = \"npt\", asids = 1 }\n", 2, &["machine.asids is 1", "2 to 256"]);
    let many = "machine = { cpus = \"npt\", asids = 257 }\n";
    refused(many, 2, &["machine.asids is 257", "2 to 256"]);
    refused("machine = { cpus = \"pv\" }\n", 3, &["unknown variant `pv`", "`npt`"]);
    step("enter = { cpu = 1, vcpu = 4 }", &["no vcpu 4", "1 to 3"]);
}

#[test]
fn names_are_words_or_ranges_of_words() {
    let grant = |pages: &str| format!("[[step]]\ngrant = {{ pages = {pages} }}\n");
    refused(&grant("\"7up\""), 4, &["`7up` is no name"]);
    refused(&grant("\"a[3..3]\""), 4, &["0 names"]);
    refused(&grant("\"a[0..]\""), 4, &["`a[0..]`", "a[0..32]"]);
    refused(&grant("\"a[0..99999999]\""), 4, &["99999999 names"]);
    refused(&grant("\"up 7\""), 4, &["`up 7` is no name"]);
    refused(&grant("\"7a[0..2]\""), 4, &["`7a` is no name"]);
    refused(&grant("3"), 4, &["expected a name"]);
}

#[test]
fn names_are_given_once() {
    let domain = "[[domain]]\nname = \"front\"\n";
    refused(domain, 3, &["`front` exists already"]);
    let device = |name: &str| format!("[[device]]\nname = \"{name}\"\nsource = 0x40\n");
    refused(&device("back"), 3, &["`back` exists already"]);
    refused(&device("dev3"), 3, &["`dev3` exists already"]);
    let far = format!("{}unit = 2\n", device("far"));
    refused(&far, 3, &["`far` is behind unit 2", "expected 0 to 0"]);
    let page = "[[step]]\npopulate = { pages = \"p\", at = 0 }\n";
    refused(&format!("{page}{page}"), 5, &["`p` is a page already"]);
}

#[test]
fn a_folder_without_scenarios_is_refused() {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/session");
    let error = parse::collect(&[source]).expect_err("there is no scenario");
    let shown = error.to_string();
    assert!(shown.contains("src/session: no scenario file (*.toml)"), "{shown}");
}

#[test]
fn accesses_say_where_and_what_they_reach() {
    step("access = { by = \"cpu1\", reaches = \"fault\" }", &["`mappings` or `at`"]);
    step("access = { by = \"cpu1\", at = 1, reaches = \"same\" }", &["`same` needs `mappings`"]);
    step("access = { by = \"cpu1\", at = [1, 2], reaches = [\"any\"] }", &["`reaches` has 1"]);
}

#[test]
fn actors_are_few_and_destroy_nothing() {
    let many: String =
        (0..5).map(|n| format!("[[step]]\nactor = \"a{n}\"\nmark = {{}}\n")).collect();
    refused(&many, 15, &["`a4` is one actor too many", "at most 4"]);
    for action in ["destroy = { domain = \"back\" }", "workload = { name = \"W1\", steps = 1 }"] {
        step(&format!("actor = \"a\"\n{action}"), &["cannot be a step of an actor"]);
    }
}

#[test]
fn reports_and_kinds_are_numbered() {
    refused("bug = \"XSA-1\"\n", 2, &["`XSA-1` is no report", "`B02`"]);
    for bug in ["B2", "B123", "Bxy", "F02"] {
        refused(&format!("bug = \"{bug}\"\n"), 2, &[&format!("`{bug}` is no report")]);
    }
    refused("kinds = [\"slow\"]\n", 2, &["`slow` is no kind", "`F02`"]);
}

#[test]
fn what_is_not_toml_is_refused_where_it_stops_making_sense() {
    refused("step = [\n", 3, &["array"]);
    refused("[[step]]\nmark = {\n", 4, &[]);
    refused("tittle = 1\n", 3, &["unknown field `tittle`"]);
}
