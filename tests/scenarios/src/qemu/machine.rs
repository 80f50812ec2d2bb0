//! The machine of a scenario, as far as QEMU's can be said to be one.

use crate::{format::Unit, parse::Script};

/// Pages of handles that a domain of the testbed can have.
const HANDLE_PAGES: usize = 48;

/// The machine, as words of the command line.
///
/// # Errors
/// Why neither QEMU nor the testbed can be such a machine.
pub(super) fn words(script: &Script) -> Result<String, String> {
    let scenario = &script.scenario;
    let (unit, machine, plain) = (&scenario.unit, &scenario.machine, Unit::default());
    if unit.count != 1 || unit.fault_records != 1 || unit.ring != 0 {
        return Err("QEMU has one unit, with one fault record, and the testbed the smallest ring"
            .to_owned());
    }
    if machine.accessed || machine.asids.is_some() || machine.flush_by_asid.is_some() {
        return Err("QEMU's CPUs mark nothing in EPT, have 16 ASIDs, and flush none of them alone"
            .to_owned());
    }
    if machine.device_tlb || scenario.device.iter().any(|device| device.get_ref().device_tlb) {
        return Err("QEMU's devices have no TLB of their own".to_owned());
    }
    if scenario.domain.len() > 1 || scenario.device.len() > 1 {
        return Err("the testbed has one further domain and one further device".to_owned());
    }
    if unit.max_address_mask > plain.max_address_mask || unit.address_bits > plain.address_bits {
        return Err("QEMU's unit has no larger blocks, and no wider addresses".to_owned());
    }
    let mut words = String::new();
    let mut word = |name: &str, value: u64| words += &format!(" {name}={value}");
    match machine.levels {
        4 => {}
        3 => word("levels", 3),
        _ => return Err("QEMU's unit walks no tables of five levels".to_owned()),
    }
    match machine.handle_pages {
        1024 => {}
        pages if pages <= HANDLE_PAGES => word("handle_pages", pages as u64),
        _ => return Err(format!("the testbed has at most {HANDLE_PAGES} pages of handles")),
    }
    let shown = [
        ("max_address_mask", unit.max_address_mask.into(), plain.max_address_mask.into()),
        ("page_selective", unit.page_selective.into(), plain.page_selective.into()),
        ("domain_id_bits", unit.domain_id_bits.into(), plain.domain_id_bits.into()),
        ("address_bits", unit.address_bits.into(), plain.address_bits.into()),
        ("write_buffer", unit.write_buffer.into(), plain.write_buffer.into()),
        ("drain_writes", unit.drain_writes.into(), plain.drain_writes.into()),
        ("drain_reads", unit.drain_reads.into(), plain.drain_reads.into()),
        ("large_leaves", unit.large_leaves.into(), plain.large_leaves.into()),
    ];
    for (name, value, _) in shown.iter().filter(|(_, value, usual)| value != usual) {
        word(name, *value);
    }
    if machine.registers {
        words += " iommu=registers";
    }
    Ok(words)
}
