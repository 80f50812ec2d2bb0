//! What granters do.

use super::{Lowered, Lowering, NONE, attempt};
use crate::{
    format::{Attempt, Entry, Grant, Sort, Word},
    values::Names,
};

/// References below are reserved.
pub(super) const FIRST_REFERENCE: u64 = 8;

impl Lowering {
    pub(super) fn grant(&mut self, grant: &Grant) -> Lowered {
        let (by, to) = (self.domain(&grant.by), self.domain(&grant.to));
        let next = self.references.get(&by).copied().unwrap_or(FIRST_REFERENCE);
        let first = grant.reference.map_or(next, u64::from);
        for (reference, page) in (first..).zip(&grant.pages.0) {
            let number = self.number(page)?;
            self.emit("grant", &[number, by, reference, to, grant.read_only.into()]);
        }
        let end = first.saturating_add(grant.pages.0.len() as u64);
        self.references.insert(by, end.max(next));
        Ok(())
    }

    pub(super) fn entry(&mut self, entry: &Entry) -> Lowered {
        let page = match &entry.page {
            Some(page) => self.number(page)?,
            None => NONE,
        };
        let (by, to) = (self.domain(&entry.by), self.domain(&entry.to));
        self.emit("entry", &[by, entry.reference.into(), entry.flags.into(), to, page]);
        Ok(())
    }

    pub(super) fn word(&mut self, word: &Word) -> Lowered {
        let sort = match word.sort {
            Sort::Shared => 0,
            Sort::Status => 1,
        };
        let value = u64::from(word.low) | u64::from(word.high) << 32;
        let by = self.domain(&word.by);
        self.emit("word", &[by, sort, word.word as u64, value]);
        Ok(())
    }

    pub(super) fn end_grants(&mut self, word: &str, pages: &Names, result: Attempt) -> Lowered {
        for page in &pages.0 {
            let number = self.number(page)?;
            self.emit(word, &[number, attempt(result)]);
        }
        Ok(())
    }
}
