"""The bill of materials of a release, by cyclonedx-python-lib: https://cyclonedx.org, specification 1.6.

The wheels contain only our code, without torch, libgomp and libstdc++; auditwheel checks this. So the list has
the released files with their checksums, torch as the only requirement at run time, and the packages that build a wheel.
"""

from pathlib import Path

from .listing import sha256

RUN_TIME = {"torch": ">=2.11"}
BUILD_TIME = ("setuptools", "ninja")


def write_sbom(folder: Path, version: str) -> Path:
    """Writes sbom.cdx.json for the sdist and the wheels of `folder`, and checks it against the schema."""
    from cyclonedx.model import HashAlgorithm, HashType, Property
    from cyclonedx.model.bom import Bom
    from cyclonedx.model.component import Component, ComponentScope, ComponentType
    from cyclonedx.model.license import DisjunctiveLicense
    from cyclonedx.output.json import JsonV1Dot6
    from cyclonedx.schema import SchemaVersion
    from cyclonedx.validation.json import JsonStrictValidator
    from packageurl import PackageURL

    bom = Bom()
    ours = Component(
        name="flash_attn_ext",
        version=version,
        type=ComponentType.LIBRARY,
        bom_ref="flash_attn_ext",
        purl=PackageURL("pypi", name="flash-attn-ext", version=version),
        licenses=[DisjunctiveLicense(id="BSD-3-Clause")],
    )
    bom.metadata.component = ours
    needed = []
    for name, scope in [(name, ComponentScope.REQUIRED) for name in RUN_TIME] + [
        (name, ComponentScope.EXCLUDED) for name in BUILD_TIME
    ]:
        wanted = (
            [Property(name="flash_attn_ext:requirement", value=f"{name}{RUN_TIME[name]}")] if name in RUN_TIME else []
        )
        component = Component(
            name=name,
            type=ComponentType.LIBRARY,
            scope=scope,
            bom_ref=name,
            purl=PackageURL("pypi", name=name),
            properties=wanted,
        )
        bom.components.add(component)
        if scope is ComponentScope.REQUIRED:
            needed.append(component)
    for file in sorted([*folder.glob("*.tar.gz"), *folder.glob("*.whl")]):
        bom.components.add(
            Component(
                name=file.name,
                type=ComponentType.FILE,
                bom_ref=file.name,
                hashes=[HashType(alg=HashAlgorithm.SHA_256, content=sha256(file))],
            )
        )
    bom.register_dependency(ours, needed)
    text = JsonV1Dot6(bom).output_as_string(indent=2)
    wrong = JsonStrictValidator(SchemaVersion.V1_6).validate_str(text)
    if wrong:
        raise ValueError(f"sbom.cdx.json does not follow CycloneDX 1.6: {wrong}")
    out = folder / "sbom.cdx.json"
    out.write_text(text + "\n")
    return out
