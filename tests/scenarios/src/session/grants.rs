//! Steps of granters: what they write, end and take back.

use std::sync::{
    Arc,
    atomic::{AtomicU64, Ordering, fence},
};

use flush::{DomainId, Gfn};
use gnttab::{GrantStorage, Version};
use host::{Taken, TakenBatch, world::granted_gfn};
use p2m::PageKind;

use super::{Doing, Session};
use crate::format::{Attempt, EndAccess, Entry, Grant, Sort, TakeBack, Word};

impl Session {
    pub(super) fn grant(&self, grant: &Grant) -> Result<(), String> {
        let (granter, to) = (self.domain(&grant.by)?.id(), self.domain(&grant.to)?.id());
        let first = grant.reference.unwrap_or_else(|| self.next_reference(granter));
        for (reference, name) in (first..).zip(&grant.pages.0) {
            let known = self.pages.borrow().get(name).cloned();
            let page = match known {
                Some(page) if self.is_live(&page) && page.owner == granter => page,
                Some(_) | None => {
                    let gfn = granted_gfn(reference);
                    let nobody = Doing { actor: 0, hook: &|| {} };
                    let (mfn, flushes) = self.give_memory(granter, gfn, 0, nobody)?;
                    // Its own memory is no part of what a call of the other side costs.
                    self.forgive(flushes);
                    self.mappings.borrow_mut().remove(name);
                    self.name_page(name, mfn, 0, granter, gfn);
                    // Its granter's own memory is no mapping to be named.
                    self.mappings.borrow_mut().remove(name);
                    self.page(name)?
                }
            };
            let flags = 1 | u16::from(grant.read_only) << 2;
            self.write_entry(granter, reference, flags, to, page.gfn)?;
            if let Some(page) = self.pages.borrow_mut().get_mut(name) {
                page.grants.push((granter, reference));
            }
            let mut references = self.references.borrow_mut();
            let next = references.entry(granter).or_insert(reference);
            *next = (*next).max(reference + 1);
        }
        let count = grant.pages.0.len();
        self.say(format!("{} grants {count} page(s) to {}", grant.by, grant.to));
        Ok(())
    }

    /// Writes an entry in the version that is in force.
    fn write_entry(
        &self,
        granter: DomainId,
        reference: u32,
        flags: u16,
        to: DomainId,
        gfn: Gfn,
    ) -> Result<(), String> {
        let mut table = self.domain_by_id(granter)?.grants();
        let per_page = table.version().per_page();
        let (page, place) = (reference as usize / per_page, reference as usize % per_page);
        if page >= table.frames() {
            table.grow(page + 1).map_err(|error| format!("the table does not grow: {error:?}"))?;
        }
        if let (Version::V1, Some(words)) = (table.version(), table.storage().as_guest(page)) {
            self.views.borrow_mut().insert((granter, page), words);
        }
        let words = table.storage().shared(page).ok_or("the table has no such page")?;
        let head = u64::from(flags) | u64::from(to.get()) << 16;
        match table.version() {
            Version::V1 => words[place].store(head | gfn.get() << 32, Ordering::SeqCst),
            Version::V2 => {
                words[2 * place + 1].store(gfn.get(), Ordering::SeqCst);
                words[2 * place].store(head, Ordering::SeqCst);
            }
        }
        Ok(())
    }

    pub(super) fn entry(&self, entry: &Entry) -> Result<(), String> {
        let (granter, to) = (self.domain(&entry.by)?.id(), self.domain(&entry.to)?.id());
        let gfn = match &entry.page {
            Some(page) => self.page(page)?.gfn,
            None => Gfn::new(0),
        };
        self.wild.borrow_mut().insert((granter, entry.reference));
        if let Some(page) = &entry.page
            && let Some(page) = self.pages.borrow_mut().get_mut(page)
        {
            page.grants.push((granter, entry.reference));
        }
        self.say(format!("{} writes entry {} of its table", entry.by, entry.reference));
        self.write_entry(granter, entry.reference, entry.flags, to, gfn)
    }

    pub(super) fn word(&self, word: &Word) -> Result<(), String> {
        let granter = self.domain(&word.by)?.id();
        let table = self.domain_by_id(granter)?.grants();
        let missing = || format!("the table of {} has no such word", word.by);
        let entry = match word.sort {
            Sort::Shared => {
                let words = table.storage().shared(word.word / 512).ok_or_else(missing)?;
                let value = u64::from(word.low) | u64::from(word.high) << 32;
                words[word.word % 512].store(value, Ordering::SeqCst);
                word.word * table.version().per_page() / 512
            }
            // In version 1 there are none, which a granter cannot know before it looks.
            Sort::Status => {
                if let Some(words) = table.storage().status(word.word / 2048) {
                    // A status word has 16 bits, as the file was checked for.
                    words[word.word % 2048].store(word.low as u16, Ordering::SeqCst);
                }
                word.word
            }
        };
        drop(table);
        let entry = u32::try_from(entry).map_err(|_| missing())?;
        self.wild.borrow_mut().insert((granter, entry));
        self.say(format!("{} writes word {} of its table", word.by, word.word));
        Ok(())
    }

    /// The bits for reading and for writing of a grant, as its granter sees them.
    pub(super) fn in_use(&self, granter: DomainId, reference: u32) -> Result<(bool, bool), String> {
        let table = self.domain_by_id(granter)?.grants();
        let reference = reference as usize;
        let bits = match table.version() {
            Version::V1 => {
                let words = table.storage().shared(reference / 512).ok_or("no such page")?;
                words[reference % 512].load(Ordering::SeqCst)
            }
            Version::V2 => {
                let words = table.storage().status(reference / 2048).ok_or("no such page")?;
                u64::from(words[reference % 2048].load(Ordering::SeqCst))
            }
        };
        Ok((bits & 1 << 3 != 0, bits & 1 << 4 != 0))
    }

    /// The frame number in an entry of a granter's table.
    pub(super) fn entry_frame(&self, granter: DomainId, reference: u32) -> Option<Gfn> {
        let table = self.domain_by_id(granter).ok()?.grants();
        let per_page = table.version().per_page();
        let (page, place) = (reference as usize / per_page, reference as usize % per_page);
        let words = table.storage().shared(page)?;
        let frame = match table.version() {
            Version::V1 => words[place].load(Ordering::SeqCst) >> 32,
            Version::V2 => words[2 * place + 1].load(Ordering::SeqCst),
        };
        Some(Gfn::new(frame))
    }

    /// Ends a grant as a careful granter does: only if it is not in use, in one step.
    fn revoke(&self, granter: DomainId, reference: u32) -> Result<bool, String> {
        let (page, place) = (reference as usize / 512, reference as usize % 512);
        let view = self.views.borrow().get(&(granter, page)).map(Arc::clone);
        if let Some(words) = view {
            // A guest waits for no lock of the hypervisor's.
            return Ok(revoke_v1(&words[place]));
        }
        let table = self.domain_by_id(granter)?.grants();
        let per_page = table.version().per_page();
        let (page, place) = (reference as usize / per_page, reference as usize % per_page);
        let words = table.storage().shared(page).ok_or("the table has no such page")?;
        match table.version() {
            Version::V1 => Ok(revoke_v1(&words[place])),
            Version::V2 => {
                let head = words[2 * place].swap(0, Ordering::SeqCst);
                fence(Ordering::SeqCst);
                let status = table.storage().status(reference as usize / 2048);
                let status = status.ok_or("no status words")?[reference as usize % 2048]
                    .load(Ordering::SeqCst);
                if status != 0 {
                    words[2 * place].store(head, Ordering::SeqCst);
                }
                Ok(status == 0)
            }
        }
    }

    fn end_grants(&self, names: &[String], expected: Attempt) -> Result<Vec<String>, String> {
        let mut ended = Vec::new();
        for name in names {
            let page = self.page(name)?;
            let mut all = true;
            for (granter, reference) in &page.grants {
                all &= self.revoke(*granter, *reference)?;
            }
            match (expected, all) {
                (Attempt::Ok, false) => {
                    self.expect(false, || format!("`{name}` is in use, and was not to be"))?;
                }
                (Attempt::Busy | Attempt::Refused, true) => {
                    self.expect(false, || format!("`{name}` is not in use, and was to be"))?;
                }
                _ => {}
            }
            if all {
                if let Some(page) = self.pages.borrow_mut().get_mut(name) {
                    page.grants.clear();
                }
                ended.push(name.clone());
            }
        }
        Ok(ended)
    }

    pub(super) fn end_access(&self, end: &EndAccess) -> Result<(), String> {
        let ended = self.end_grants(&end.pages.0, end.result)?;
        self.say(format!("{} of {} grants are ended", ended.len(), end.pages.0.len()));
        Ok(())
    }

    pub(super) fn take_back(&self, take: &TakeBack, doing: Doing<'_>) -> Result<(), String> {
        let ended = self.end_grants(&take.pages.0, take.result)?;
        for name in &ended {
            self.free_page(name, doing)?;
        }
        self.say(format!("the owner frees {} of {} pages", ended.len(), take.pages.0.len()));
        Ok(())
    }

    /// The owner of a page takes it out of its memory and frees it.
    fn free_page(&self, name: &str, doing: Doing<'_>) -> Result<(), String> {
        let page = self.page(name)?;
        if !self.is_live(&page) {
            return Err(format!("`{name}` is free already"));
        }
        let guest = self.domain_by_id(page.owner)?;
        let expected = p2m::Expected { mfn: page.mfn, kind: PageKind::RamReadWrite };
        let mut result = Ok(());
        let flushes = self.as_domain(page.owner, |caller| {
            let mut batch = TakenBatch::new(page.owner);
            let held = batch.hold(|skipped| {
                let cleared = guest.clear(page.gfn, expected, skipped)?;
                Ok::<_, p2m::ClearError>((Taken { mfn: page.mfn, order: 0 }, cleared))
            });
            if held.is_err() {
                result = Err(format!("`{name}` is not where its owner had it"));
            }
            self.finish(page.owner, batch, caller, doing, &mut result);
        });
        // The owner's own flush is no part of what a call of the other side costs.
        self.forgive(flushes);
        self.expect(result.is_ok(), || format!("freeing `{name}`: {result:?}"))?;
        let left = self.world.hypervisor.pages.get(page.mfn).0;
        self.expect(left == 0, || format!("`{name}` is still counted by somebody"))
    }
}

/// Takes an entry of version 1 back in one step, unless it is in use.
fn revoke_v1(entry: &AtomicU64) -> bool {
    let word = entry.load(Ordering::SeqCst);
    let idle = word & (1 << 3 | 1 << 4) == 0;
    idle && entry.compare_exchange(word, 0, Ordering::SeqCst, Ordering::SeqCst).is_ok()
}
