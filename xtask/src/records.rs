//! Lines of results that programs under test print for this one to read
//!
//! A `Record` is one line of the form `@ kind key=value key=value`; the kind may
//! be missing. The testbed prints them on its serial line, bench programs on
//! standard output. All other text is for people and is ignored here.

use std::collections::BTreeMap;
use std::str::FromStr;

use anyhow::{Context, Result};

/// One line of results.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Record {
    /// The first word, if it is not a pair; otherwise empty.
    pub(crate) kind: String,
    fields: BTreeMap<String, String>,
}

impl Record {
    /// The value of `key`.
    ///
    /// # Errors
    /// If the key is missing or its value is not a `T`.
    pub(crate) fn get<T: FromStr>(&self, key: &str) -> Result<T> {
        let line = || format!("in the result line `@ {} {:?}`", self.kind, self.fields);
        let value = self.fields.get(key).with_context(|| format!("no `{key}` {}", line()))?;
        let parsed = value.parse().ok();
        parsed.with_context(|| format!("`{key}={value}` is not a number {}", line()))
    }
}

/// Every record in `text`, in order.
pub(crate) fn parse(text: &str) -> Vec<Record> {
    text.lines().filter_map(parse_line).collect()
}

/// The only record of `kind` in `records`.
///
/// # Errors
/// If there is none, or more than one.
pub(crate) fn only<'a>(records: &'a [Record], kind: &str) -> Result<&'a Record> {
    let mut found = records.iter().filter(|record| record.kind == kind);
    let first = found.next().with_context(|| format!("the program printed no `@ {kind}` line"))?;
    anyhow::ensure!(found.next().is_none(), "the program printed more than one `@ {kind}` line");
    Ok(first)
}

fn parse_line(line: &str) -> Option<Record> {
    let words = line.trim_end().strip_prefix("@ ")?;
    let mut record = Record { kind: String::new(), fields: BTreeMap::new() };
    for (position, word) in words.split_whitespace().enumerate() {
        match word.split_once('=') {
            Some((key, value)) => {
                record.fields.insert(key.to_owned(), value.to_owned());
            }
            None if position == 0 => word.clone_into(&mut record.kind),
            None => {}
        }
    }
    Some(record)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_marked_lines_are_records() {
        let records = parse("SeaBIOS\r\n@ demo grants=32 waits=1\r\n @ x=1\n@ a=b\nPASS demo\n");
        assert_eq!(records.len(), 2);
        assert_eq!(records[0].kind, "demo");
        assert_eq!(records[0].get::<u32>("grants").ok(), Some(32));
        assert_eq!(records[1].kind, "");
        assert_eq!(records[1].get::<String>("a").ok(), Some("b".to_owned()));
    }

    #[test]
    fn a_missing_or_malformed_value_names_itself() {
        let records = parse("@ demo grants=many\n");
        let message = |key| format!("{:#}", records[0].get::<u32>(key).expect_err("malformed"));
        assert!(message("grants").contains("`grants=many`"));
        assert!(message("waits").contains("no `waits`"));
    }

    #[test]
    fn one_line_of_a_kind_is_demanded() {
        let records = parse("@ a x=1\n@ b x=1\n@ b x=2\n");
        assert!(only(&records, "a").is_ok());
        assert!(only(&records, "b").is_err());
        assert!(only(&records, "c").is_err());
    }
}
