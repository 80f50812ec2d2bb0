//! Every way round the invariant that we know is a compile error.
//!
//! After a change of compiler: `TRYBUILD=overwrite cargo test -p quiesce-misuse`, then
//! read the difference: each case must still fail for the reason in its first line.

#[test]
fn no_misuse_compiles() {
    let cases = trybuild::TestCases::new();
    cases.pass("cases/correct.rs");
    cases.compile_fail("cases/fail/*.rs");
}
