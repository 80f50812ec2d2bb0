//! Accesses: who, where, and what comes of them.

use super::{ANY, CONTROLLER, Layout, Lowered, Lowering, NONE, hardware::NO_WALK};
use crate::{
    format::{Access, AccessKind},
    parse::is_cpu,
};

impl Lowering {
    pub(super) fn access(&mut self, access: &Access) -> Lowered {
        let mut places = Vec::new();
        for name in access.mappings.iter().flat_map(|names| &names.0) {
            let placed = self.mappings.get(name).ok_or_else(|| format!("`{name}` is nowhere"))?;
            places.push((placed.gfn, placed.page.clone()));
        }
        if let Some(numbers) = &access.at {
            let count = numbers.many().unwrap_or(1);
            let numbers = (0..count).filter_map(|place| numbers.at(place));
            places.extend(numbers.map(|gfn| (*gfn, String::new())));
        }
        for name in &access.by.0 {
            let Some(who) = self.who(name, access.kind)? else { continue };
            for (place, (gfn, own)) in places.iter().enumerate() {
                let page = match access.reaches.at(place).map_or("any", String::as_str) {
                    "any" => ANY,
                    "fault" => NONE,
                    "same" => self.number(own)?,
                    other => self.number(other)?,
                };
                if let Some(domain) = self.inside.get(&who) {
                    let reach = self.runs.entry((who, *domain)).or_default();
                    // The first half is in reach anyway.
                    reach.extend((gfn >> 27 != 0).then_some(gfn >> 27));
                }
                let write = u64::from(access.kind == AccessKind::Write);
                self.emit("reaches", &[who, *gfn, page, write]);
            }
        }
        Ok(())
    }

    /// The number of a processor or device, if it can make such an access.
    fn who(&mut self, name: &str, kind: AccessKind) -> Result<Option<u64>, String> {
        let Some(cpu) = is_cpu(name) else {
            let device = self.device(name)?;
            if kind == AccessKind::Read && device != CONTROLLER {
                self.skip("what the further device reads is not seen");
                return Ok(None);
            }
            return Ok(Some(device));
        };
        if self.layout == Layout::Shared {
            self.skip(NO_WALK);
            return Ok(None);
        }
        Ok(Some(cpu as u64))
    }
}
