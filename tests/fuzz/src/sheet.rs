//! A story as it becomes a scenario file, step by step while it is played.
//!
//! A [`Sheet`] is blank for a search, which costs nothing; one that is [`open`](Sheet::open)
//! keeps what it is told up to the moment of a panic. What scenarios have no words for is
//! [left out](Sheet::left_out) with the reason.

use std::{
    fmt::{Debug, Write},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use toml::{Table, Value};

/// Where a story is written down, or nowhere. Clones are the same sheet.
#[derive(Clone, Debug, Default)]
pub(crate) struct Sheet(Option<Arc<Mutex<Written>>>);

#[derive(Debug, Default)]
struct Written {
    frame: Vec<(&'static str, Table)>,
    first: Vec<String>,
    steps: Vec<String>,
    left_out: usize,
    /// The most flushes of each kind that calls may ask for.
    bound: u64,
}

/// Keys of a TOML table.
macro_rules! keys {
    ($($key:ident: $value:expr),* $(,)?) => {
        toml::Table::from_iter([
            $((stringify!($key).to_owned(), toml::Value::from($value))),*
        ])
    };
}

pub(crate) use keys;

/// A number of a file. Those beyond what a file can hold lie beyond all memory, like the
/// largest that it can.
pub(crate) fn number(number: u64) -> Value {
    Value::Integer(i64::try_from(number).unwrap_or(i64::MAX))
}

pub(crate) fn numbers(all: impl IntoIterator<Item = u64>) -> Value {
    Value::Array(all.into_iter().map(number).collect())
}

/// A list of names such as `m0`, with ranges where they follow each other.
pub(crate) fn names<'a>(stem: &str, all: impl IntoIterator<Item = &'a u32>) -> Value {
    let mut ranges: Vec<(u32, u32)> = Vec::new();
    for name in all {
        match ranges.last_mut() {
            Some((_, end)) if *end == *name => *end += 1,
            _ => ranges.push((*name, *name + 1)),
        }
    }
    let text = |(first, end): (u32, u32)| match end - first {
        1 => format!("{stem}{first}"),
        _ => format!("{stem}[{first}..{end}]"),
    };
    Value::from(ranges.into_iter().map(text).collect::<Vec<_>>())
}

impl Sheet {
    /// A sheet that is written on.
    pub(crate) fn open() -> Self {
        Self(Some(Arc::default()))
    }

    fn lock(&self) -> Option<MutexGuard<'_, Written>> {
        // A panic in the middle of a story is what sheets are for.
        self.0.as_ref().map(|written| written.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// A table of the file's head, such as `machine`, or one of several, such as `[device]`.
    pub(crate) fn frame(&self, name: &'static str, keys: Table) {
        if let Some(mut written) = self.lock() {
            written.frame.push((name, keys));
        }
    }

    /// A step before all others.
    pub(crate) fn first(&self, action: &str, keys: impl FnOnce() -> Table) {
        if let Some(mut written) = self.lock() {
            let step = block(None, action, keys());
            written.first.push(step);
        }
    }

    /// A step, with the flushes of each kind that it may ask for.
    pub(crate) fn step(&self, action: &str, flushes: u64, keys: impl FnOnce() -> Table) {
        self.step_of(None, action, flushes, keys);
    }

    /// A step of an actor.
    pub(crate) fn step_of(
        &self,
        actor: Option<&str>,
        action: &str,
        flushes: u64,
        keys: impl FnOnce() -> Table,
    ) {
        if let Some(mut written) = self.lock() {
            written.bound += flushes;
            let step = block(actor, action, keys());
            written.steps.push(step);
        }
    }

    /// Something that no step of a scenario can say.
    pub(crate) fn left_out(&self, what: &impl Debug, why: &str) {
        if let Some(mut written) = self.lock() {
            written.left_out += 1;
            written.steps.push(format!("# Left out, for {why}: {what:?}\n"));
        }
    }

    /// The file, and how many steps were left out of it.
    pub(crate) fn text(&self, title: &str, about: &str) -> Option<(String, usize)> {
        let written = self.lock()?;
        let bound = keys! { tlb: number(written.bound), iotlb: number(written.bound) };
        let (title, about) = (Value::from(title), Value::from(about));
        let mut text =
            format!("title = {title}\nbound = {}\nabout = {about}\n", Value::Table(bound));
        // Writing to a string cannot fail.
        for (name, keys) in &written.frame {
            writeln!(text, "\n[{name}]").unwrap_or_default();
            for (key, value) in keys {
                writeln!(text, "{key} = {value}").unwrap_or_default();
            }
        }
        for step in written.first.iter().chain(&written.steps) {
            write!(text, "\n{step}").unwrap_or_default();
        }
        Some((text, written.left_out))
    }
}

fn block(actor: Option<&str>, action: &str, keys: Table) -> String {
    let actor = actor.map(|actor| format!("actor = \"{actor}\"\n")).unwrap_or_default();
    format!("[[step]]\n{actor}{action} = {}\n", Value::Table(keys))
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    #[test]
    fn what_is_written_down_can_be_read_again() {
        let sheet = Sheet::open();
        sheet.frame("machine", keys! { tables: "shared" });
        sheet.step("map", 1, || keys! { pages: names("g", &[0, 1, 2, 5]), at: number(16) });
        sheet.left_out(&"a\nline", "no reason");
        sheet.first("grant", || keys! { pages: names("g", &[0, 1, 2, 3, 4, 5]) });
        let (text, left_out) = sheet.text("A \"title\"", "two\nlines").expect("it is open");
        assert_eq!(left_out, 1);
        assert!(text.contains(r#"pages = ["g[0..3]", "g5"]"#), "{text}");
        let script = scenarios::parse::parse(Path::new("made-up.toml"), &text);
        let script = script.unwrap_or_else(|problem| panic!("{problem}\n{text}"));
        assert_eq!(script.steps.len(), 2);
        assert_eq!(script.scenario.bound.get_ref().iotlb, 1);
    }

    #[test]
    fn a_blank_sheet_is_not_written_on() {
        let sheet = Sheet::default();
        sheet.step("map", 1, || panic!("nobody asks"));
        assert_eq!(sheet.text("title", "about"), None);
    }
}
