//! What granters do: grant, end grants, take pages back.

use arrayvec::ArrayVec;
use flush::Gfn;
use testbed::ensure;
use testbed::failure::{Context, Failure};
use testbed::scenario::NONE;

use super::{Page, Played, name, number};
use crate::embedding::PageInfo;

/// Where a granter has the pages it grants, by reference.
const GRANTED: u64 = 0x1000;

impl Played<'_> {
    pub(super) fn grant_step(&mut self, word: &str, values: &[u64]) -> Result<bool, Failure> {
        match (word, values) {
            ("grant", [page, granter, reference, to, read_only]) => {
                self.grant(*page, *granter, *reference, *to, *read_only)?;
            }
            ("entry", [granter, reference, flags, to, page]) => {
                let granter = number(*granter)?;
                let reference = u32::try_from(*reference).context("a reference")?;
                let gfn = if *page == NONE { Gfn::new(0) } else { self.page(*page)?.gfn };
                if *page != NONE {
                    self.note_grant(*page, (granter, reference))?;
                }
                let flags = u16::try_from(*flags).context("flags")?;
                self.world.write_entry(granter, reference, flags, number(*to)?, gfn)?;
            }
            ("word", [by, sort, word, value]) => {
                let word = usize::try_from(*word).context("a word")?;
                self.world.write_word(number(*by)?, *sort != 0, word, *value)?;
            }
            ("ends", [page, expected]) => {
                self.end_grants(*page, *expected)?;
            }
            ("take-back", [page, expected]) => {
                if self.end_grants(*page, *expected)? {
                    let Page { gfn, owner, .. } = *self.page(*page)?;
                    let owner = self.world.guest(owner)?;
                    self.world.hypervisor.depopulate(owner, gfn, |_| Ok(()))?;
                }
            }
            _ => return Ok(false),
        }
        Ok(true)
    }

    fn note_grant(&mut self, page: u64, grant: (flush::DomainId, u32)) -> Result<(), Failure> {
        let known =
            self.books.pages.get_mut(name(page)?).and_then(Option::as_mut).context("a page")?;
        known.grants.try_push(grant).ok().context("room for another grant of a page")
    }

    fn grant(
        &mut self,
        page: u64,
        granter: u64,
        reference: u64,
        to: u64,
        read_only: u64,
    ) -> Result<(), Failure> {
        let (owner, reference) =
            (number(granter)?, u32::try_from(reference).context("a reference")?);
        let known = self.books.pages.get(name(page)?).and_then(Option::as_ref);
        let lives = known.is_some_and(|page| {
            page.owner == owner && PageInfo::of(page.frame).is_some_and(|info| info.counts().0 > 0)
        });
        if !lives {
            let gfn = Gfn::new(GRANTED + u64::from(reference));
            let frame = self.world.hypervisor.populate(self.world.guest(owner)?, gfn, 0)?;
            let grants = ArrayVec::new();
            self.know(page, Page { frame, gfn, order: 0, owner, grants })?;
        }
        let flags = 1 | u16::from(read_only != 0) << 2;
        let gfn = self.page(page)?.gfn;
        self.world.write_entry(owner, reference, flags, number(to)?, gfn)?;
        self.note_grant(page, (owner, reference))
    }

    /// Ends all grants of a page that are not in use; whether that was all.
    fn end_grants(&mut self, page: u64, expected: u64) -> Result<bool, Failure> {
        let grants = self.page(page)?.grants.clone();
        let mut all = true;
        for (granter, reference) in grants {
            all &= self.world.revoke(granter, reference)?;
        }
        ensure!(all || expected != 0, "page {page} is in use, and was not to be");
        ensure!(!all || expected != 1, "page {page} is not in use, and was to be");
        let known = self.books.pages.get_mut(name(page)?).and_then(Option::as_mut);
        if let (true, Some(known)) = (all, known) {
            known.grants.clear();
        }
        Ok(all)
    }
}
