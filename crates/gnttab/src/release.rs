//! The second half of an unmap: flush, and only then drop what mappings held.
//!
//! Everything here takes proof of the flush: [`give_out`] a flushed batch, [`release`]
//! one released pin. A batch whose flush failed goes to the embedder whole.

use flush::{Batch, Flushed, Released};

use crate::{
    abi::Errno,
    domain::{BATCH, Crash, Domain, FlushFailure, RETRIES, Verdict},
    pin::Pin,
};

/// The batch of one call.
pub(crate) type PinBatch = Batch<Pin, BATCH>;

const _: () = assert!(size_of::<PinBatch>() <= 4096);

/// Flushes what the batch has on record, and gives its pages out. If the flush fails, the
/// embedder's verdict decides.
///
/// # Errors
/// [`Errno::Fault`] if the flush failed for good: every page went to the embedder, still
/// held.
pub(crate) fn settle<D: Domain>(domain: &D, batch: &mut PinBatch) -> Result<(), Errno> {
    match batch.flush(&domain.hardware()) {
        Ok(flushed) => {
            give_out(domain, flushed);
            Ok(())
        }
        Err(failure) => insist(domain, failure),
    }
}

/// Asks the embedder about a failed flush, and tries again as long as that is its verdict.
#[cold]
#[inline(never)]
fn insist<D: Domain>(domain: &D, mut failure: FlushFailure<D>) -> Result<(), Errno> {
    let mut retries = 0;
    let verdict = loop {
        match domain.judge(&failure, retries) {
            Verdict::Retry if retries < RETRIES => retries += 1,
            verdict @ (Verdict::Retry | Verdict::Quarantine | Verdict::Crash) => break verdict,
        }
        match failure.held.retry(&domain.hardware()) {
            Ok(flushed) => {
                give_out(domain, flushed);
                return Ok(());
            }
            Err(error) => failure.error = error,
        }
    };
    // First the pages: ending the caller may be all that their keeper waits for.
    domain.on_flush_failure(failure);
    match verdict {
        Verdict::Crash => domain.crash(Crash::FlushFailed),
        Verdict::Retry | Verdict::Quarantine => {}
    }
    Err(Errno::Fault)
}

/// Drops what the mappings of a flushed batch held, and frees its table pages.
pub fn give_out<D: Domain>(domain: &D, mut flushed: Flushed<'_, Pin, BATCH>) {
    let mut next = flushed.next_page();
    while let Some(pin) = next {
        next = release_alike(domain, pin, || flushed.next_page());
    }
    while let Some(table) = flushed.next_table() {
        domain.put_table(table);
    }
}

/// Drops what one mapping held: dirty mark, page and type reference, pin, in-use bits.
///
/// It is one critical section of the granter's table, so that the granter never sees a
/// grant free whose page is still counted.
pub fn release<D: Domain>(domain: &D, pin: Released<Pin>) {
    let rest = release_alike(domain, pin, || None);
    debug_assert!(rest.is_none(), "there was no more to come");
}

/// Releases `pin`, and what follows as long as it is of the same granter: in one critical
/// section, of at most a batch. Returns the first that is not.
fn release_alike<D: Domain>(
    domain: &D,
    pin: Released<Pin>,
    mut more: impl FnMut() -> Option<Released<Pin>>,
) -> Option<Released<Pin>> {
    let holding = pin.get().holding();
    if !holding.is_granted() {
        domain.put_page(pin, false);
        return more();
    }
    let granter = holding.granter();
    let mut waiting = Some(pin);
    let found = domain.with_granter(granter, |table| {
        let mut next = waiting.take();
        while let Some(pin) = next {
            let holding = pin.get().holding();
            if !holding.is_of(granter) {
                return Some(pin);
            }
            table.end_access(holding, pin, |pin| domain.put_page(pin, holding.wrote()));
            next = more();
        }
        None
    });
    match found {
        Some(next) => next,
        // Without its granter the page still has the reference that the mapping took.
        None => {
            if let Some(pin) = waiting {
                domain.put_page(pin, holding.wrote());
            }
            more()
        }
    }
}
